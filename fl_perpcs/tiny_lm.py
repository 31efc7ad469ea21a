"""The embedded base LLM: a half-million-parameter Llama, pre-trained here on first use.

It lets every strategy run in minutes on a laptop without a download. It knows the film
vocabulary, the task's format and the plausible tags of each film kind, but no community's
convention: the text it is trained on comes from a population of its own, in which every user
is a community.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from fl_perpcs.data.film_words import (
    COMPANIONS,
    ERAS,
    FILM_KINDS,
    FIRST_SENTENCES,
    MOODS,
    SECOND_SENTENCES,
)
from fl_perpcs.data.personas import Personas
from fl_perpcs.paths import home
from fl_perpcs.seeds import derive_seed
from fl_perpcs.tasks import load_task

PAD, EOS = "<pad>", "<eos>"

Item = tuple[list[int], int]
"""Token ids, and how many of them belong to the prompt."""


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights of the tiny LM depend on.

    Attributes
    ----------
    hidden, intermediate, layers, heads : int
        The Llama's widths (in units), layers and attention heads.
    users, items : int
        Size of the pre-training population, and items of each user (mean).
    steps, batch : int
        Optimiser steps, and examples in each.
    lr : float
        Peak learning rate of AdamW; linear warm-up, then cosine decay to zero.
    prompt_weight : float
        Weight of a prompt token's loss where a response token's is 1. Learning to predict
        the descriptions is what makes hidden states tell film kinds apart.
    seed : int
        Seed of the population, the initial weights and the order.
    threads : int
        Torch threads while pre-training. More would add sums in another order, and stall on a
        busy machine: the matrices are small, and threads that wait for each other spin.
    version : int
        Raised when the code changes what comes out.
    """

    hidden: int = 96
    intermediate: int = 256
    layers: int = 4
    heads: int = 4
    users: int = 600
    items: int = 32
    steps: int = 300
    batch: int = 64
    lr: float = 4e-3
    prompt_weight: float = 0.1
    seed: int = 2024
    threads: int = 1
    version: int = 1

    def digest(self) -> str:
        """Return a digest of the recipe, the vocabulary and a sample of the text."""
        population = self._population()
        sample = [population.user(user_id) for user_id in population.user_ids()[:64]]
        content = [asdict(self), build_vocabulary(), [asdict(user) for user in sample]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    def texts(self) -> list[tuple[str, str]]:
        """Return the (prompt, response) pairs to train on, shuffled."""
        population = self._population()
        pairs = [
            (population.task.prompt(example.input), f" {example.output}")
            for user_id in population.user_ids()
            for example in population.user(user_id).history
        ]
        Random(derive_seed(self.seed, "order")).shuffle(pairs)
        return pairs

    def _population(self) -> Personas:
        # The derived seed keeps its communities apart from those of any run.
        seed = derive_seed(self.seed, "tiny-lm population")
        return Personas(self.users, self.users, history=self.items, queries=0, seed=seed)


DEFAULT_RECIPE = Recipe()


def ensure_tiny_lm(show_progress: bool = True, recipe: Recipe = DEFAULT_RECIPE) -> Path:
    """Return the folder of the tiny LM; pre-train it if it is not there yet.

    Parameters
    ----------
    show_progress : bool, default True
        Draw a progress bar on stderr while pre-training.
    recipe : Recipe
        What to train and how; each recipe has a folder of its own.

    Returns
    -------
    Path
        A folder in ``home()/"cache"`` that ``AutoModelForCausalLM`` and ``AutoTokenizer``
        load. It appears only when complete; processes that ask at the same time wait for
        the one that trains.
    """
    folder = home() / "cache" / f"tiny-lm-{recipe.digest()}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _train_into(folder, recipe, show_progress)
    return folder


def build_vocabulary() -> list[str]:
    """Return the words that have a token of their own, with the space before them, sorted."""
    task = load_task("movie-tagging")
    phrases = [*task.labels, *COMPANIONS, *ERAS, *MOODS, *FIRST_SENTENCES, *SECOND_SENTENCES]
    for kind in FILM_KINDS:
        phrases += [*kind.heroes, *kind.plots, *kind.places, *kind.turns]
    words = set(_words(task.template)) | set(_words(load_task("debian-synopsis").template))
    for phrase in phrases:
        # Any phrase may open a sentence; the names of slots are not text.
        plain = re.sub(r"\{\w+\}", "", phrase)
        words.update(_words(f" {plain}") + _words(f" {plain[:1].upper()}{plain[1:]}"))
    return sorted(words)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token for each word of the generator, other text in bytes.

    A word carries the space before it and no token crosses a word's edge, so that the ids of
    prompt and response, concatenated, are the ids of the concatenated text. No token is added
    at either end.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [w for w in build_vocabulary() if w not in alphabet]
    # Any word beats its spelling, since every further token costs as much as the first.
    scores = [(PAD, 0.0), (EOS, 0.0), *((token, -1.0) for token in [*alphabet, *words])]
    core = Tokenizer(models.Unigram(scores))
    core.pre_tokenizer = _pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[^\sA-Za-z]|\s"), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, spell])


def _words(text: str) -> list[str]:
    return [word for word, _ in _pre_tokenizer().pre_tokenize_str(text)]


def _train_into(folder: Path, recipe: Recipe, show_progress: bool) -> None:
    """Train beside the folder, then rename, so that half a model is never found."""
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = build_tokenizer()
        model = pretrain(recipe, tokenizer, show_progress)
        with _no_hub_bars():
            model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        draft.chmod(0o755)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _no_hub_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own for the one file that is written."""
    before = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            hf_logging.enable_progress_bar()


def pretrain(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, show_progress: bool
) -> LlamaForCausalLM:
    """Return a model that is trained by the recipe.

    Parameters
    ----------
    recipe : Recipe
        Architecture, data and steps.
    tokenizer : PreTrainedTokenizerFast
        From :func:`build_tokenizer`.
    show_progress : bool
        Draw a progress bar on stderr.

    Returns
    -------
    LlamaForCausalLM
        In evaluation mode, float32, on the CPU.
    """
    items = [_encode(tokenizer, prompt, response) for prompt, response in recipe.texts()]
    batches = _batches(items, recipe.batch, Random(derive_seed(recipe.seed, "batches")))
    with _torch_state(recipe.seed, recipe.threads):
        model = LlamaForCausalLM(_model_config(recipe, tokenizer))
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _lr_factor(step, recipe.steps)
        )
        model.train()
        steps = track(
            range(recipe.steps),
            description="Pre-training the tiny LM (first use only)",
            console=Console(stderr=True),
            disable=not show_progress,
        )
        for step in steps:
            batch = batches[step % len(batches)]
            loss = _loss(model, batch, recipe.prompt_weight)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def _model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _encode(tokenizer: PreTrainedTokenizerFast, prompt: str, response: str) -> Item:
    """Return the ids of prompt, response and end, and how many belong to the prompt."""
    # The same ids as from calling the tokenizer, without the cost of its checks.
    core = tokenizer.backend_tokenizer
    before = core.encode(prompt, add_special_tokens=False).ids
    after = core.encode(response, add_special_tokens=False).ids
    return [*before, *after, tokenizer.eos_token_id], len(before)


def _batches(items: list[Item], size: int, rng: Random) -> list[list[Item]]:
    """Return batches of items of about one length: padding is a third of the work otherwise."""
    by_length = sorted(items, key=lambda item: len(item[0]))
    batches = [by_length[i : i + size] for i in range(0, len(items), size)]
    rng.shuffle(batches)
    return batches


def _loss(
    model: LlamaForCausalLM,
    batch: list[Item],
    prompt_weight: float,
) -> torch.Tensor:
    """Return the mean response loss plus the weighted mean prompt loss, in nats per token."""
    longest = max(len(ids) for ids, _ in batch)
    # Any id will do for padding: it is masked, and its loss is not counted.
    inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
    position = torch.arange(longest)
    length = torch.tensor([len(ids) for ids, _ in batch])[:, None]
    num_prompt = torch.tensor([num for _, num in batch])[:, None]
    mask = position < length
    logits = model(input_ids=inputs, attention_mask=mask.long()).logits
    per_token = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten(), reduction="none"
    ).view(len(batch), longest - 1)
    response = (mask & (position >= num_prompt))[:, 1:]
    prompt = (mask & (position < num_prompt))[:, 1:]
    return per_token[response].mean() + prompt_weight * per_token[prompt].mean()


def _lr_factor(step: int, steps: int) -> float:
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextmanager
def _torch_state(seed: int, threads: int) -> Iterator[None]:
    """Seed torch and set its threads; put both back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)
