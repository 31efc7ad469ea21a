"""From examples to token ids; the response is always kept whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fl_perpcs.data import Example
from fl_perpcs.tasks import Task

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
    examples: Sequence[Example], task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Encoded]:
    """Tokenize examples as prompt + " " + response + eos.

    A long input is shortened at its end so that the example has at most ``max_length``
    tokens; an example whose response leaves no room for any input is left out, so the result
    can be shorter than ``examples``.
    """
    encoded = []
    for example in examples:
        ids = tokenizer(" " + example.output, add_special_tokens=False)["input_ids"]
        response = (*ids, tokenizer.eos_token_id)
        prompt = encode_prompt(example.input, task, tokenizer, max_length - len(response))
        if prompt:
            encoded.append(Encoded(prompt, response))
    return encoded


def encode_prompt(
    text: str, task: Task, tokenizer: PreTrainedTokenizerBase, budget: int
) -> tuple[int, ...]:
    """Tokenize a prompt, its input shortened to fit ``budget`` tokens; () if nothing fits."""
    start = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id]
    while True:
        ids = start + tokenizer(task.prompt(text), add_special_tokens=False)["input_ids"]
        excess = len(ids) - budget
        if excess <= 0:
            return tuple(ids)
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        if excess >= len(offsets):
            return ()
        # Cutting at a token's start loses at least one character, so this ends.
        text = text[: offsets[len(offsets) - excess][0]].rstrip()


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
