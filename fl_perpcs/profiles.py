"""Users' profiles: short texts about them that go before every prompt.

References
----------
Richardson et al., "Integrating Summarization and Retrieval for Enhanced Personalization via
Large Language Models", 2023.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fl_perpcs.errors import PerPcsError
from fl_perpcs.runs import write_atomically
from fl_perpcs.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fl_perpcs.config import Config
    from fl_perpcs.data import Example
    from fl_perpcs.prompts import Prompt

ITEMS = 10
"""History items that a profile is written from, drawn at random (as published)."""


def write_profiles(
    config: "Config",
    path: Path,
    *,
    max_new_tokens: int = 100,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Let the base LLM write a profile of every user, from items of its history.

    A profile is the first line of the answer, greedy unless ``evaluation.temperature`` is set. The
    file is written after each batch, and users that it has are skipped: an interrupted call goes
    on where it stopped.

    Parameters
    ----------
    config : Config
        Its source of users, base LLM (without adaptation), ``roles.max-history``,
        ``evaluation.batch-size`` and seed.
    path : Path
        JSON file of profiles by user id.
    max_new_tokens : int
        Longest profile, in tokens; each prompt gets the rest of ``lm.max-length``.
    progress : callable
        Called with the number of users that are done, and of all.

    Raises
    ------
    PerPcsError
        If the task has no profile template, ``max_new_tokens`` leaves no room for the history,
        or the file is malformed.
    """
    from fl_perpcs.data import open_source
    from fl_perpcs.evaluation import generate
    from fl_perpcs.lm import load_lm
    from fl_perpcs.prompts import profile_prompt

    source = open_source(config)
    task = source.task.model_copy(update={"max_new_tokens": max_new_tokens})
    if not task.profile_template:
        raise PerPcsError(f"the task {task.name!r} has no profile-template; add one to its file")
    if max_new_tokens >= config.lm.max_length // 2:
        raise PerPcsError(
            f"profiles of {max_new_tokens} tokens leave no room for the history in"
            f" lm.max-length = {config.lm.max_length}; raise it or ask for shorter profiles"
        )
    profiles = dict(read_profiles(str(path))) if path.exists() else {}
    users, size = source.user_ids(), config.evaluation.batch_size
    waiting = [user for user in users if user not in profiles]
    lm = load_lm(config) if waiting else None
    for start in range(0, len(waiting), size):
        batch = waiting[start : start + size]
        progress(len(users) - len(waiting) + start, len(users))
        assert lm is not None
        prompts = [
            as_chat(
                profile_prompt(_some(source.user(user).history, config, user), task), lm.tokenizer
            )
            for user in batch
        ]
        texts = generate(lm, task, prompts, config.evaluation, config.lm.max_length, config.seed)
        profiles |= dict(zip(batch, texts, strict=True))
        write_atomically(path, json.dumps(profiles, indent=1, ensure_ascii=False))
    progress(len(users), len(users))


def as_chat(prompt: "Prompt", tokenizer: "PreTrainedTokenizerBase") -> "Prompt":
    """Return a prompt as a message to an assistant, if that is how the model was tuned.

    An instruction-tuned model answers a bare instruction poorly, and a base LLM has no template.
    """
    if not tokenizer.chat_template:
        return prompt
    message = [{"role": "user", "content": prompt.template}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    # The token itself is put there when the prompt is encoded.
    return replace(prompt, template=text.removeprefix(str(tokenizer.bos_token or "")))


def _some(history: "Sequence[Example]", config: "Config", user: str) -> "list[Example]":
    """Draw the items that a user's profile is written from, in their order."""
    known = history[-config.roles.max_history :]
    rng = random.Random(derive_seed(config.seed, user, "profile"))
    chosen = sorted(rng.sample(range(len(known)), min(ITEMS, len(known))))
    return [known[i] for i in chosen]


def profile_of(user_id: str, path: str) -> str:
    """Return a user's profile; "" without a file.

    Raises
    ------
    PerPcsError
        If the file has no profile of this user, or is malformed.
    """
    if not path:
        return ""
    profiles = _profiles_once(path)
    if user_id not in profiles:
        raise PerPcsError(
            f"{path} has no profile of user {user_id!r}; add it, or write the file anew with"
            " perpcs data profiles"
        )
    return profiles[user_id]


def read_profiles(path: str) -> Mapping[str, str]:
    """Read profiles by user id, as in the published ``profile-id2text.json``.

    Raises
    ------
    PerPcsError
        If the file is missing or is not a JSON object of texts; names the file and the user.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PerPcsError(
            f"prompts.profiles = {path!r} cannot be read: {error.strerror}; write it with"
            " perpcs data profiles"
        ) from None
    except ValueError as error:
        raise PerPcsError(f"prompts.profiles = {path!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PerPcsError(f"{path} holds a {type(found).__name__}; expected an object of texts")
    for user, text in found.items():
        if not isinstance(text, str):
            raise PerPcsError(f"{path}, user {user!r}: {text!r} is not a text")
    return {user: text.strip() for user, text in found.items()}


@cache
def _profiles_once(path: str) -> Mapping[str, str]:
    """Read profiles once in a worker process."""
    return read_profiles(path)
