"""A task is data: prompt templates, labels, metrics and generation limits, read from TOML."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fl_perpcs.config import Config, ConfigError, Positive, Section
from fl_perpcs.errors import PerPcsError

BUILTIN = Path(__file__).parent / "builtin"


def fill(template: str, **values: str) -> str:
    """Put values in the place of ``{name}``; other braces stay as they are.

    All at once, so that a value may hold ``{input}`` or a brace itself.
    """
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m.group(1), m.group(0)), template)


def slots(template: str) -> set[str]:
    """Return the names that a template has in braces."""
    return set(re.findall(r"\{(\w+)\}", template))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


class LampItem(Section):
    """How a profile item of a LaMP file becomes a history item."""

    input: str = ""
    """Template over the item's fields; empty: the item has an output only."""
    output: str
    """Template over the item's fields."""


class LampFormat(Section):
    """How a LaMP file words this task."""

    id: str
    """The task's name inside LaMP files and for LaMP's evaluator, such as ``LaMP_2``."""
    path: str = ""
    """The task's folder on LaMP's server; empty: not public."""
    question: Annotated[str, AfterValidator(_pattern)]
    """Regular expression that finds the fields of a question's input, as named groups."""
    input: str = "{input}"
    """Template over those groups."""
    items: tuple[LampItem, ...]
    """Tried in order: the first whose fields an item has."""

    @model_validator(mode="after")
    def _check(self) -> "LampFormat":
        groups = set(re.compile(self.question).groupindex)
        if unknown := sorted(slots(self.input) - groups):
            raise ValueError(f"input: {{{unknown[0]}}} is no group of question")
        return self


class Task(Section):
    """How a user's examples are put to the language model and how answers are scored.

    Prompts end where the response begins; the response follows after one space. The whole
    example is the prompt, a space, the response and the end-of-sequence token.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    """The task's name in configs and reports."""
    title: str = ""
    """One line for people."""
    template: str
    """Prompt of a query, with ``{input}``."""
    history_template: str = ""
    """Prompt of a history item with an input; empty: as of a query."""
    text_template: str = ""
    """Prompt of a history item without an input, whose output is plain text."""
    retrieved_template: str = "{input} {output}\n"
    """A history item as an example in another prompt, with ``{input}`` and ``{output}``."""
    retrieved_text_template: str = "{output}\n"
    """The same for a history item without an input."""
    profile_template: str = ""
    """Prompt that asks a language model for a user's profile, with ``{history}``."""
    profile_item_template: str = ""
    """A history item in that prompt; empty: as in other prompts."""
    metrics: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names in :mod:`fl_perpcs.tasks.metrics`, the main one first."""
    max_new_tokens: Positive
    """Longest answer that is generated, in tokens."""
    labels: tuple[str, ...] = ()
    """All possible answers of a classification or rating task, else empty."""
    lamp: LampFormat | None = None
    """How LaMP files word the task, if they do."""

    @model_validator(mode="after")
    def _check(self) -> "Task":
        from fl_perpcs.tasks.metrics import METRICS

        for name in ("template", "history_template"):
            template = getattr(self, name)
            if template and "input" not in slots(template):
                raise ValueError(f"{name.replace('_', '-')} has no {{input}}")
        if self.profile_template and "history" not in slots(self.profile_template):
            raise ValueError("profile-template has no {history}")
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ValueError(f"metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}")
        needy = [name for name in self.metrics if METRICS[name].needs_labels]
        if needy and not self.labels:
            raise ValueError(f"metrics: {needy[0]!r} needs labels")
        if {"mae", "rmse"} & set(self.metrics):
            for label in self.labels:
                if not re.fullmatch(r"-?\d+(\.\d+)?", label):
                    raise ValueError(f"labels: {label!r} is no number, as mae and rmse need")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels has a label twice")
        return self

    def prompt(self, text: str) -> str:
        """Return the prompt of a query with this input."""
        return fill(self.template, input=text)


@cache
def load_task(name: str) -> Task:
    """Return a built-in task, or one from a TOML file of the user's own.

    Parameters
    ----------
    name : str
        A built-in task's name, or the path of a TOML file.

    Raises
    ------
    PerPcsError
        If there is no such task, or the file is not one; names the file and the field.
    """
    path = BUILTIN / f"{name}.toml" if name in task_names() else Path(name).expanduser()
    if path.suffix != ".toml":
        raise PerPcsError(
            f"the task {name!r} is not known; use one of {', '.join(task_names())},"
            " or the path of a TOML file"
        )
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return Task.model_validate(table)
    except OSError as error:
        raise PerPcsError(f"the task file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PerPcsError(f"the task file {path} is not TOML: {error}") from None
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'the task'}: {e['msg']}" for e in error.errors()
        ]
        raise PerPcsError(f"the task file {path}: {'; '.join(problems)}") from None


def check_task(config: Config, task: Task) -> None:
    """Check that a task's queries can be answered as the config says.

    Raises
    ------
    ConfigError
        If labels are to be ranked and the task has none.
    """
    if config.evaluation.answers == "rank" and not task.labels:
        raise ConfigError(
            [
                f'evaluation.answers = "rank", but the task {task.name!r} has no labels to rank;'
                ' set it to "generate" or "none"'
            ]
        )


@cache
def task_names() -> tuple[str, ...]:
    """Return the names of the built-in tasks."""
    return tuple(sorted(path.stem for path in BUILTIN.glob("*.toml")))
