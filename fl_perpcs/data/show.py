"""A user's data as the model will see it: prompts after retrieval and shortening, and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from fl_perpcs.config import Config
from fl_perpcs.data import Example, Source
from fl_perpcs.prompts import Prompt, preamble_of, prompts_of_history, prompts_of_queries
from fl_perpcs.text import encode


@dataclass(frozen=True)
class Shown:
    """One example; ``prompt`` is None and ``tokens`` 0 if it does not fit ``lm.max-length``."""

    id: str
    prompt: str | None
    response: str
    tokens: int


def show_user(
    config: Config, source: Source, user_id: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Shown], list[Shown]]:
    """Return a user's history and queries as they are encoded in a run.

    Raises
    ------
    PerPcsError
        If there is no such user, or its profile or the sentence encoder cannot be had.
    """
    user = source.user(user_id)
    items = user.history[-config.roles.max_history :]
    preamble = preamble_of(config.prompts, user_id, torch.device("cpu"))
    limit = config.lm.max_length
    return (
        _shown(prompts_of_history(items, source.task, preamble), items, tokenizer, limit),
        _shown(
            prompts_of_queries(user.queries, items, source.task, preamble),
            user.queries,
            tokenizer,
            limit,
        ),
    )


def _shown(
    prompts: Sequence[Prompt],
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
) -> list[Shown]:
    shown = []
    for prompt, example in zip(prompts, examples, strict=True):
        found = encode([prompt], [example.output], tokenizer, limit)
        text = tokenizer.decode(list(found[0].prompt)) if found else None
        tokens = len(found[0].prompt) + len(found[0].response) if found else 0
        assert text is None or isinstance(text, str)
        shown.append(Shown(example.id, text, example.output, tokens))
    return shown
