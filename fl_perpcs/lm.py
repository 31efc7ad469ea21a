"""The base LLM, its tokenizer, and the place in it where an adapter is put."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from fl_perpcs.config import Config, LoraSection, words
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home
from fl_perpcs.pieces import Adapter, Factors, load_peft
from fl_perpcs.seeds import derive_seed

SLOT = "default"
"""PEFT's name for the one adapter that a base LLM carries here."""


@dataclass
class Passes:
    """Examples that went through the base LLM, and back through it for gradients."""

    forward: int = 0
    backward: int = 0


@dataclass
class LM:
    """A base LLM with a slot for one adapter.

    Attributes
    ----------
    model : PeftModel
        Base weights frozen; the slot's factors are float32.
    tokenizer : PreTrainedTokenizerBase
    sites : dict of str to LoraLayer
        In the order of the forward pass.
    fingerprint : str
        Of the base LLM, with the adaptation merged into it.
    passes : Passes
        What the model has been put through so far, whoever called it.
    """

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    sites: dict[str, LoraLayer]
    fingerprint: str
    passes: Passes

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def pad(self) -> int:
        """The padding token's id."""
        return int(self.tokenizer.pad_token_id)  # type: ignore[arg-type]  # never a list here


def model_path(name: str) -> str:
    """Return the folder or hub name that ``lm.name`` stands for.

    Raises
    ------
    PerPcsError
        If a named local model is not on this machine.
    """
    if name == "tiny":
        from fl_perpcs.tiny_lm import ensure_tiny_lm

        return str(ensure_tiny_lm())
    if name == "smollm2":
        folder = home() / "models" / "smollm2-135m-instruct"
        if not folder.is_dir():
            raise PerPcsError(
                f'lm.name = "smollm2", but {folder} does not exist; run: perpcs fetch smollm2'
            )
        return str(folder)
    path = Path(name).expanduser()
    if path.is_absolute() and not path.is_dir():
        raise PerPcsError(
            f"lm.name = {name!r} is no folder; give a folder with config.json and safetensors,"
            " or the name of a model on the Hugging Face hub"
        )
    return str(path) if path.is_absolute() else name


def load_lm(config: Config) -> LM:
    """Load the base LLM and give it a slot for adapters.

    Raises
    ------
    PerPcsError
        If the model cannot be loaded, or has no module named in ``lora.target-modules``.
    """
    tokenizer = load_tokenizer(config)
    try:
        base = AutoModelForCausalLM.from_pretrained(
            model_path(config.lm.name),
            dtype=getattr(torch, config.lm.dtype),
            use_safetensors=True,
            trust_remote_code=config.lm.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise PerPcsError(f"lm.name = {config.lm.name!r} cannot be loaded: {error}") from None
    base.to(_device(config))  # type: ignore[arg-type]  # transformers' own wrapper
    return attach(base, tokenizer, config.lora)


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the base LLM's tokenizer; its padding token is eos if it has none.

    Raises
    ------
    PerPcsError
        If it cannot be loaded or has no eos token.
    """
    name = config.lm.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_path(name), trust_remote_code=config.lm.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise PerPcsError(f"lm.name = {name!r} cannot be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise PerPcsError(f"the tokenizer of lm.name = {name!r} has no eos token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def attach(base: Any, tokenizer: PreTrainedTokenizerBase, lora: LoraSection) -> LM:
    """Give a transformers model a slot for adapters.

    Parameters
    ----------
    base : transformers.PreTrainedModel
        Any decoder; it is changed in place.
    tokenizer : PreTrainedTokenizerBase
    lora : LoraSection

    Raises
    ------
    PerPcsError
        If the model has none of the target modules.
    """
    fingerprint = _fingerprint(base.state_dict())
    model = _with_slot(base, lora)
    model.eval()  # a new slot's dropout is active
    return LM(model, tokenizer, _sites(model), fingerprint, _count_passes(model))


def site_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Return (d_in, d_out) of every site, without loading any weight.

    Raises
    ------
    PerPcsError
        As :func:`load_lm`.
    """
    try:
        lm_config = AutoConfig.from_pretrained(
            model_path(config.lm.name), trust_remote_code=config.lm.trust_remote_code
        )
        with torch.device("meta"):
            model = _with_slot(
                AutoModelForCausalLM.from_config(
                    lm_config, trust_remote_code=config.lm.trust_remote_code
                ),
                config.lora,
            )
    except (OSError, ValueError) as error:
        raise PerPcsError(f"lm.name = {config.lm.name!r} cannot be loaded: {error}") from None
    return _shapes(_sites(model))


def initial_adapter(
    shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, user: str = ""
) -> Adapter:
    """Return the adapter that training starts from: a seeded A, and B = 0.

    A is drawn as PEFT draws it, uniform in ±1/√d_in (Kaiming with a = √5). All users who
    start from the same A can mix their pieces; ``user`` gives a user an A of its own.
    """
    adapter = {}
    for site, (d_in, d_out) in shapes.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora-A", site, user))
        A = (torch.rand(rank, d_in, generator=generator) * 2 - 1) / math.sqrt(d_in)
        adapter[site] = Factors(A, torch.zeros(d_out, rank))
    return adapter


def shapes_of(lm: LM) -> dict[str, tuple[int, int]]:
    """Return (d_in, d_out) of every site of a loaded base LLM."""
    return _shapes(lm.sites)


def put_adapter(lm: LM, adapter: Adapter) -> None:
    """Put an adapter in the slot; sites that it lacks get B = 0, no update.

    The rank may differ from the slot's (delta merges have a higher one).

    Raises
    ------
    PerPcsError
        If the adapter has sites that the base LLM lacks.
    """
    strange = [site for site in adapter if site not in lm.sites]
    if strange:
        raise PerPcsError(f"the base LLM has no site {strange[0]!r}; was it made for another one?")
    for site, layer in lm.sites.items():
        if site in adapter:
            put_factors(layer, adapter[site])
        else:
            empty_site(layer)


def put_factors(layer: LoraLayer, factors: Factors) -> None:
    """Put a copy of one site's factors in place."""
    for slot, value in zip(slot_factors(layer), factors, strict=True):
        slot.data = value.detach().to(device=slot.device, dtype=torch.float32, copy=True)


def empty_site(layer: LoraLayer) -> None:
    """Set B = 0: no update at this site."""
    slot_factors(layer).B.data.zero_()


def slot_factors(layer: LoraLayer) -> Factors:
    """Return the factors in a site's slot themselves, as parameters."""
    weights = (factor[SLOT].weight for factor in (layer.lora_A, layer.lora_B))
    return Factors(*(cast(torch.nn.Parameter, weight) for weight in weights))


def take_adapter(lm: LM) -> Adapter:
    """Return a copy of the adapter in the slot, float32 on the CPU."""
    return {
        site: Factors(*(factor.detach().cpu().clone() for factor in slot_factors(layer)))
        for site, layer in lm.sites.items()
    }


def adapter_parameters(lm: LM, factors: str = "AB") -> list[torch.nn.Parameter]:
    """Return the slot's factors, for training: both, or only "A" or "B"."""
    found = [getattr(slot_factors(layer), f) for layer in lm.sites.values() for f in factors]
    return cast(list[torch.nn.Parameter], found)


def merge_into_base(lm: LM, adapter: Adapter) -> None:
    """Add an adapter's update to the base weights, for good, and empty the slot.

    The sum is rounded to the weights' type: in bfloat16 much of a small update is lost.

    Raises
    ------
    PerPcsError
        If the adapter has sites that the base LLM lacks.
    """
    fingerprint = f"{lm.fingerprint}+{adapter_digest(adapter)}"
    put_adapter(lm, adapter)
    with torch.no_grad():
        for layer in lm.sites.values():
            weight = cast(Tensor, layer.get_base_layer().weight)
            # PEFT knows how each kind of layer lays out its weight (Conv1D is transposed).
            weight += cast(Any, layer).get_delta_weight(SLOT).to(weight.dtype)
            empty_site(layer)
    lm.fingerprint = fingerprint


def adapter_digest(adapter: Adapter) -> str:
    """Return a digest of an adapter's bytes."""
    digest = hashlib.sha256()
    for site in sorted(adapter):
        for factor in adapter[site]:
            digest.update(site.encode() + factor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def load_adaptation(config: Config, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read the task adapter of ``adaptation.mode = "load"``, of the config's scale.

    Parameters
    ----------
    config : Config
    shapes : mapping of str to (int, int)
        (d_in, d_out) of the base LLM's sites.

    Raises
    ------
    PerPcsError
        If the folder is no LoRA adapter, or not of this base LLM's sites and shapes.
    """
    folder = Path(config.adaptation.adapter)
    adapter, scale = load_peft(folder)
    for site, (A, B) in adapter.items():
        if site not in shapes or shapes[site] != (A.shape[1], B.shape[0]):
            raise PerPcsError(
                f"adaptation.adapter = {str(folder)!r}: site {site!r} of shape"
                f" {(A.shape[1], B.shape[0])} does not fit lm.name = {config.lm.name!r}"
            )
    factor = scale / config.lora.scale
    return {site: Factors(A, B * factor) for site, (A, B) in adapter.items()}


def _with_slot(base: Any, lora: LoraSection) -> PeftModel:
    try:
        return get_peft_model(
            base,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides it by r
                use_rslora=lora.variant == "rslora",
                lora_dropout=lora.dropout,
                target_modules=words(lora.target_modules),
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as error:
        raise PerPcsError(
            f"lora.target-modules = {lora.target_modules!r} does not fit the base LLM: {error}"
        ) from None


def _sites(model: PeftModel) -> dict[str, LoraLayer]:
    return {
        name: module
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, LoraLayer)
    }


def _shapes(sites: Mapping[str, LoraLayer]) -> dict[str, tuple[int, int]]:
    shapes = {site: (layer.in_features, layer.out_features) for site, layer in sites.items()}
    return cast(dict[str, tuple[int, int]], shapes)


def decoder_of(model: PeftModel) -> torch.nn.Module:
    """Return the base LLM without its head: what every use of it goes through."""
    return cast(torch.nn.Module, model.get_base_model().base_model)


def _count_passes(model: PeftModel) -> Passes:
    passes = Passes()

    def count(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        passes.forward += len(hidden)
        if hidden.requires_grad:
            hidden.register_hook(count_back)

    def count_back(gradient: Tensor) -> None:
        passes.backward += len(gradient)

    decoder_of(model).register_forward_hook(count, with_kwargs=True)
    return passes


def _device(config: Config) -> torch.device:
    name = config.lm.device
    if name == "auto":
        # A worker that was given no GPU may see one all the same.
        wanted = config.federation.client_gpus > 0 and torch.cuda.is_available()
        return torch.device("cuda" if wanted else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PerPcsError(f"lm.device = {name!r} cannot be used here: {error}") from None
    return device


def _fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes and a spread of values of each weight.

    Values are sampled: a whole 7B model would take a minute to hash in every worker, and
    any fine-tuning changes weights everywhere.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        flat = state[name].detach().flatten()
        step = max(1, flat.numel() // 1024)
        sample = flat[::step].float().cpu().contiguous()
        digest.update(f"{name}{tuple(state[name].shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
