"""Prompts: the task's instruction, with retrieved history items and a profile before it.

References
----------
Tan et al., "Democratizing Large Language Models via Personalized Parameter-Efficient
Fine-tuning", EMNLP 2024 (retrieval- and profile-augmented prompts).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fl_perpcs.config import PromptsSection
from fl_perpcs.data import Example
from fl_perpcs.profiles import profile_of
from fl_perpcs.retrieval import Ranker, find_ranker
from fl_perpcs.tasks import Task, fill

PROFILE = "### User Profile:\n{profile}\n\n"
HISTORY = "### User History:\n{history}\n\n"


@dataclass(frozen=True)
class Prompt:
    """A prompt in its parts, so that it can be shortened where that does least harm.

    Attributes
    ----------
    template : str
        The instruction, with ``{input}`` where the input goes; ``{history}`` where the
        retrieved items go if that is not before the instruction.
    input : str
        May be empty: an item that is plain text.
    retrieved : tuple of str
        Texts of the retrieved items that may be shortened: inputs, or plain texts.
    frames : tuple of (str, str)
        For each of them its template, and its output ("" for plain text).
    profile : str
        Of the user.
    """

    template: str
    input: str
    retrieved: tuple[str, ...] = ()
    frames: tuple[tuple[str, str], ...] = ()
    profile: str = ""

    def render(self) -> str:
        """Return the prompt as text."""
        items = "".join(
            fill(frame, input=text, output=output or text)
            for (frame, output), text in zip(self.frames, self.retrieved, strict=True)
        )
        return (
            (fill(PROFILE, profile=self.profile) if self.profile else "")
            + (fill(HISTORY, history=items) if items and "{history}" not in self.template else "")
            + fill(self.template, input=self.input, history=items)
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts that may be shortened: the input, the profile, the retrieved texts."""
        return (self.input, self.profile, *self.retrieved)

    def with_texts(self, texts: Sequence[str]) -> "Prompt":
        """Return the prompt with other texts in their places."""
        return replace(self, input=texts[0], profile=texts[1], retrieved=tuple(texts[2:]))

    def with_less(self) -> "Prompt | None":
        """Return the prompt without its last retrieved item, or its profile; None with neither."""
        if self.retrieved:
            return replace(self, retrieved=self.retrieved[:-1], frames=self.frames[:-1])
        return replace(self, profile="") if self.profile else None


def query_prompt(
    query: Example, task: Task, retrieved: Sequence[Example] = (), profile: str = ""
) -> Prompt:
    """Return the prompt of a query.

    Parameters
    ----------
    query : Example
        Its output is not looked at.
    task : Task
    retrieved : sequence of Example
        History items to show, the most relevant first.
    profile : str
        The user's profile, empty for none.
    """
    return Prompt(
        task.template,
        query.input,
        tuple(item.input or item.output for item in retrieved),
        tuple(
            (task.retrieved_template, item.output)
            if item.input
            else (task.retrieved_text_template, "")
            for item in retrieved
        ),
        profile,
    )


def history_prompt(
    item: Example, task: Task, retrieved: Sequence[Example] = (), profile: str = ""
) -> Prompt:
    """Return the prompt that a history item is trained with.

    Plain text asks nothing, so nothing is retrieved for it and no profile is put before it.
    """
    if not item.input:
        return Prompt(task.text_template, "")
    prompt = query_prompt(item, task, retrieved, profile)
    return replace(prompt, template=task.history_template or task.template)


def profile_prompt(items: Sequence[Example], task: Task) -> Prompt:
    """Return the prompt that asks for a user's profile, some history items in it."""
    if task.profile_item_template:
        task = task.model_copy(update={"retrieved_template": task.profile_item_template})
    prompt = query_prompt(Example("", "", ""), task, items)
    return replace(prompt, template=task.profile_template)


@dataclass(frozen=True)
class Preamble:
    """What is put before the instruction: the k most relevant history items, and a profile."""

    rank: Ranker | None = None
    k: int = 0
    profile: str = ""


PLAIN = Preamble()
"""Nothing."""


def preamble_of(how: PromptsSection, user_id: str, device: torch.device) -> Preamble:
    """Return what the config puts before a user's prompts.

    Raises
    ------
    PerPcsError
        If the sentence encoder or the user's profile cannot be had.
    """
    rank = find_ranker(how.retriever, how.encoder, device) if how.retrieve else None
    return Preamble(rank, how.retrieve, profile_of(user_id, how.profiles))


def prompts_of_queries(
    queries: Sequence[Example],
    history: Sequence[Example],
    task: Task,
    preamble: Preamble = PLAIN,
) -> list[Prompt]:
    """Return the prompts of queries, each with its most relevant history items."""
    found = _retrieve(preamble, history, queries, [len(history)] * len(queries))
    return [
        query_prompt(query, task, items, preamble.profile)
        for query, items in zip(queries, found, strict=True)
    ]


def prompts_of_history(
    history: Sequence[Example], task: Task, preamble: Preamble = PLAIN
) -> list[Prompt]:
    """Return the prompts that a history is trained with.

    Each item is shown earlier items only: never itself, and none that came after it.
    """
    found = _retrieve(preamble, history, history, range(len(history)))
    return [
        history_prompt(item, task, items, preamble.profile)
        for item, items in zip(history, found, strict=True)
    ]


def _retrieve(
    preamble: Preamble,
    history: Sequence[Example],
    asked: Sequence[Example],
    limits: Sequence[int],
) -> list[list[Example]]:
    """Return for each example asked about its k best among the first so many history items."""
    if preamble.rank is None or not history:
        return [[] for _ in asked]
    documents = [f"{item.input} {item.output}".strip() for item in history]
    ranked = preamble.rank(documents, [example.input for example in asked], preamble.k, limits)
    return [[history[i] for i in indices] for indices in ranked]
