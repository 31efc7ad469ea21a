"""A task is data: a prompt template, labels, metrics and generation limits."""

from dataclasses import dataclass

TAGS = (
    "sci-fi",
    "based on a book",
    "comedy",
    "action",
    "twist ending",
    "dystopia",
    "dark comedy",
    "classic",
    "psychology",
    "fantasy",
    "romance",
    "thought-provoking",
    "social commentary",
    "violence",
    "true story",
)
"""The 15 tags of LaMP-2M (Salemi et al., 2024, table 1)."""


@dataclass(frozen=True)
class Task:
    """How a user's example is put to the language model and how the answer is scored.

    Attributes
    ----------
    name : str
        The task's name in configs and reports.
    template : str
        The prompt, with ``{input}`` where the example's input goes. The response follows
        after one space.
    metrics : tuple of str
        Names in :mod:`fl_perpcs.tasks.metrics`, the main one first.
    max_new_tokens : int
        Longest answer that is generated, in tokens.
    labels : tuple of str
        All possible answers of a classification task, else empty.
    """

    name: str
    template: str
    metrics: tuple[str, ...]
    max_new_tokens: int
    labels: tuple[str, ...] = ()

    def prompt(self, text: str) -> str:
        """Return the prompt for an input."""
        return self.template.replace("{input}", text)


MOVIE_TAGGING = Task(
    name="movie-tagging",
    template="Which tag does this movie relate to? Description: {input} Tag:",
    metrics=("accuracy",),
    max_new_tokens=8,
    labels=TAGS,
)

DEBIAN_SYNOPSIS = Task(
    name="debian-synopsis",
    template="Write a one-line synopsis of the following software package.\n"
    "Description: {input}\nSynopsis:",
    metrics=("rouge-l",),
    max_new_tokens=24,
)
