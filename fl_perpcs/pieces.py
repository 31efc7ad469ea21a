"""Adapters, the pieces they break into, and the PEFT folders they come from and go to."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_perpcs.errors import PerPcsError

PREFIX = "base_model.model."
NOT_PLAIN = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "alora_invocation_tokens",
)
"""Settings in a PEFT config with which A and B alone do not say what the adapter does."""


class Factors(NamedTuple):
    """The two low-rank factors of one site: A of shape (r, d_in), B of shape (d_out, r)."""

    A: Tensor
    B: Tensor


Adapter = dict[str, Factors]
"""A PEFT state: the factors of every adapted site, in the order of the forward pass."""

Gates = dict[str, Tensor]
"""One gate of shape (d_in,) for each site."""


@dataclass(frozen=True)
class Piece:
    """What a sharer shares of one site: its factors and its gate of shape (d_in,)."""

    site: str
    A: Tensor
    B: Tensor
    gate: Tensor


def split(adapter: Adapter, gates: Gates) -> list[Piece]:
    """Break an adapter into pieces, one for each site.

    Raises
    ------
    PerPcsError
        If adapter and gates are not of the same sites.
    """
    if adapter.keys() != gates.keys():
        odd = sorted(adapter.keys() ^ gates.keys())
        raise PerPcsError(f"adapter and gates differ in the sites {odd[:3]}; train both together")
    return [Piece(site, f.A, f.B, gates[site]) for site, f in adapter.items()]


def join(pieces: Iterable[Piece]) -> Adapter:
    """Put pieces of one sharer back together; the inverse of :func:`split`, bit for bit."""
    return {piece.site: Factors(piece.A, piece.B) for piece in pieces}


def name_factors(adapter: Adapter, factors: str = "AB") -> dict[str, Tensor]:
    """Return an adapter, or one of its factors, as tensors ``<site>.lora_A``, ``<site>.lora_B``."""
    return {
        f"{site}.lora_{name}": getattr(both, name)
        for site, both in adapter.items()
        for name in factors
    }


def name_tensors(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return pieces as tensors ``<site>.lora_A``, ``<site>.lora_B`` and ``<site>.gate``."""
    return {
        f"{piece.site}.{name}": tensor
        for piece in pieces
        for name, tensor in (("lora_A", piece.A), ("lora_B", piece.B), ("gate", piece.gate))
    }


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return pieces from named tensors; the inverse of :func:`name_tensors`.

    Raises
    ------
    PerPcsError
        If a piece lacks a factor or its gate.
    """
    sites = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    try:
        return [
            Piece(s, tensors[f"{s}.lora_A"], tensors[f"{s}.lora_B"], tensors[f"{s}.gate"])
            for s in sites
        ]
    except KeyError as error:
        raise PerPcsError(f"the pieces lack {error}; expected A, B and a gate of each") from None


def stack(first: Adapter, second: Adapter) -> Adapter:
    """Return the adapter whose update is the sum of two updates, exactly.

    Along the rank: A = [A₁; A₂], B = [B₁, B₂]. Sites of only one adapter keep its factors.
    """
    both = {
        site: Factors(
            torch.cat([first[site].A, second[site].A]),
            torch.cat([first[site].B, second[site].B], dim=1),
        )
        for site in first
        if site in second
    }
    return {**first, **second, **both}


def save_peft(adapter: Adapter, folder: Path, *, scale: float, base: str) -> Path:
    """Write an adapter as a PEFT folder that ``PeftModel.from_pretrained`` loads.

    Sites of a lower rank are filled up with zeros, which changes no output.

    Parameters
    ----------
    adapter : Adapter
    folder : Path
        Written as a whole under a temporary name, then renamed; must not exist.
    scale : float
        α/r that the adapter was trained with.
    base : str
        Name or folder of the base LLM, for ``adapter_config.json``.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    PerPcsError
        If the folder exists or cannot be made, or the adapter has no site.
    """
    if folder.exists():
        raise PerPcsError(f"{folder} exists; name a new folder for the adapter")
    if not adapter:
        raise PerPcsError("the adapter has no site; expected at least one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PerPcsError(
            f"{folder} cannot be written ({error.strerror}); name a folder that you can write to"
        ) from None
    rank = max(f.A.shape[0] for f in adapter.values())
    config = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,  # type: ignore[arg-type]  # PEFT divides it by r, a float will do
        target_modules=sorted({site.rsplit(".", 1)[-1] for site in adapter}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    tensors = {}
    for site, (A, B) in adapter.items():
        missing = rank - A.shape[0]
        tensors[f"{PREFIX}{site}.lora_A.weight"] = torch.nn.functional.pad(A, (0, 0, 0, missing))
        tensors[f"{PREFIX}{site}.lora_B.weight"] = torch.nn.functional.pad(B, (0, missing))
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    config.save_pretrained(str(temporary))
    # PEFT keeps the modules as a set, whose order changes from process to process.
    path = temporary / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["target_modules"].sort()
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
        temporary / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    temporary.replace(folder)
    return folder


def load_peft(folder: Path) -> tuple[Adapter, float]:
    """Read a LoRA adapter from a PEFT folder.

    Returns
    -------
    adapter : Adapter
    scale : float
        Its α/r.

    Raises
    ------
    PerPcsError
        If the folder is not a plain LoRA in safetensors form.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
        kind, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PerPcsError(
            f"{folder} is not a PEFT folder with adapter_config.json and"
            f" adapter_model.safetensors ({error})"
        ) from None
    odd = [key for key in NOT_PLAIN if config.get(key)]
    if kind != "LORA" or odd:
        raise PerPcsError(
            f"{folder} holds peft_type {kind!r} with {', '.join(odd) or 'no options'};"
            " expected a plain LoRA of one rank"
        )
    return _factors(tensors, folder), alpha / rank


def _factors(tensors: Mapping[str, Tensor], folder: Path) -> Adapter:
    adapter: Adapter = {}
    for name in tensors:
        if not name.endswith(".lora_A.weight"):
            continue
        site = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        other = name.replace(".lora_A.", ".lora_B.")
        if other not in tensors:
            raise PerPcsError(f"{folder} has {name} but no {other}; export the adapter again")
        adapter[site] = Factors(tensors[name], tensors[other])
    if not adapter or len(tensors) != 2 * len(adapter):
        raise PerPcsError(
            f"{folder} holds {len(tensors)} tensors, {2 * len(adapter)} of them LoRA factors;"
            " expected lora_A and lora_B weights and nothing else"
        )
    return adapter
