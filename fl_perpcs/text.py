"""From examples to token ids; the response is always kept whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fl_perpcs.prompts import Prompt

IGNORE = -100
"""Label of a token without loss, as in transformers."""


@dataclass(frozen=True)
class Encoded:
    """An example as token ids; ``response`` ends with eos."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Right-padded examples, each tensor of shape (batch, tokens)."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def predicts_response(self) -> Tensor:
        """The positions whose next token is a response token, (batch, tokens), bool."""
        following = torch.full_like(self.labels, IGNORE)
        following[:, :-1] = self.labels[:, 1:]
        return following != IGNORE

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return Batch(*(t.to(device) for t in (self.input_ids, self.attention_mask, self.labels)))


def encode(
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> list[Encoded]:
    """Tokenize prompts and their responses as prompt + " " + response + eos.

    A response is kept whole and its prompt shortened to fit (:func:`encode_prompt`); where that
    is not possible the example is left out, so the result can be shorter than ``prompts``.

    Parameters
    ----------
    prompts : sequence of Prompt
    responses : sequence of str
    tokenizer : PreTrainedTokenizerBase
    max_length : int
        Tokens of a prompt with its response.
    """
    encoded = []
    for prompt, text in zip(prompts, responses, strict=True):
        response = response_ids(text, tokenizer)
        if start := encode_prompt(prompt, tokenizer, max_length - len(response)):
            encoded.append(Encoded(start, response))
    return encoded


def response_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens of a response: " " + text, and eos."""
    ids = tokenizer(" " + text, add_special_tokens=False)["input_ids"]
    return (*ids, tokenizer.eos_token_id)


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, budget: int
) -> tuple[int, ...]:
    """Tokenize a prompt within a budget of tokens; () if that is not possible.

    The input, the profile and the retrieved texts are cut at their ends to one common length,
    so the longest lose first. If that would leave nothing of one of them, the last retrieved
    item is dropped, then the profile, and never the whole input.
    """
    start = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id]
    while True:
        ids = start + tokenizer(prompt.render(), add_special_tokens=False)["input_ids"]
        excess = len(ids) - budget
        if excess <= 0:
            return tuple(ids)
        shorter = _shortened(prompt, tokenizer, excess) or prompt.with_less()
        if shorter is None:
            return ()
        prompt = shorter


def _shortened(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, excess: int) -> Prompt | None:
    """Cut about ``excess`` tokens from a prompt's texts; None if one would be left empty."""
    offsets = [
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for text in prompt.texts
    ]
    # The highest common length that frees enough.
    lengths = [len(o) for o in offsets]
    cap = max(lengths)
    while cap and sum(max(0, n - cap) for n in lengths) < excess:
        cap -= 1
    if not cap:
        return None
    # Cutting at a token's start loses at least one character, so shortening comes to an end.
    cut = [
        text[: o[cap][0]].rstrip() if len(o) > cap else text
        for text, o in zip(prompt.texts, offsets, strict=True)
    ]
    if any(not new and old for new, old in zip(cut, prompt.texts, strict=True)):
        return None
    return prompt.with_texts(cut)


def collate(encoded: Sequence[Encoded], pad: int) -> Batch:
    """Pad examples on the right to one length."""
    width = max(len(e.prompt) + len(e.response) for e in encoded)
    shape = (len(encoded), width)
    input_ids = torch.full(shape, pad)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE)
    for row, e in enumerate(encoded):
        length = len(e.prompt) + len(e.response)
        input_ids[row, :length] = torch.tensor(e.prompt + e.response)
        attention_mask[row, :length] = 1
        labels[row, len(e.prompt) : length] = torch.tensor(e.response)
    return Batch(input_ids, attention_mask, labels)


def in_batches(encoded: Sequence[Encoded], size: int, pad: int) -> list[Batch]:
    """Collate examples in their order, ``size`` at a time."""
    return [collate(encoded[i : i + size], pad) for i in range(0, len(encoded), size)]
