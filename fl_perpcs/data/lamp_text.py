"""From LaMP's wording to examples: how a question and a profile item become text."""

import re
from collections.abc import Mapping
from typing import Any

from fl_perpcs.data.users import Example
from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import Task, fill, load_task, task_names
from fl_perpcs.tasks.task import LampFormat, slots


def lamp_task(name: str) -> tuple[Task, LampFormat]:
    """Return a task and how LaMP files word it.

    Raises
    ------
    PerPcsError
        If there is no such task, or LaMP files do not word it; lists those they do.
    """
    known = ", ".join(each for each in task_names() if load_task(each).lamp)
    if not name:
        raise PerPcsError(f"data.task is empty; name the task of the LaMP files: one of {known}")
    task = load_task(name)
    if task.lamp is None:
        raise PerPcsError(
            f"the task {name!r} has no [lamp] table, so LaMP files cannot be read as this task;"
            f" use one of {known}, or add the table to the task's file"
        )
    return task, task.lamp


def read_question(task: Task, text: str, where: str) -> str:
    """Return the input of a query from the wording of a question.

    Parameters
    ----------
    task : Task
        With a ``[lamp]`` table.
    text : str
        The question's input, instruction included.
    where : str
        File and record, for messages.

    Raises
    ------
    PerPcsError
        If the question is worded in another way.
    """
    assert task.lamp is not None
    text = as_text(text, "input", where)
    found = re.search(task.lamp.question, text)
    if found is None:
        raise PerPcsError(
            f"{where}: the input begins {text[:80]!r}; expected the wording of {task.name},"
            f" {task.lamp.question!r}. Set data.task to the task of these files, or mend"
            " lamp.question in a task file of your own"
        )
    fields = {name: (value or "").strip() for name, value in found.groupdict().items()}
    return fill(task.lamp.input, **fields).strip()


def read_item(task: Task, item: Mapping[str, Any], item_id: str, where: str) -> Example | None:
    """Return the history item that a profile item is.

    Parameters
    ----------
    task : Task
        With a ``[lamp]`` table.
    item : mapping
    item_id : str
    where : str
        File, record and item, for messages.

    Returns
    -------
    Example or None
        None if there is nothing to learn: the output is blank, or the input is and the task
        has no history items without one.

    Raises
    ------
    PerPcsError
        If a field is missing or is neither text nor a number.
    """
    assert task.lamp is not None
    alternatives = task.lamp.items
    lacks = [sorted(slots(a.input + a.output) - item.keys()) for a in alternatives]
    fitting = [a for a, missing in zip(alternatives, lacks, strict=True) if not missing]
    if not fitting:
        raise PerPcsError(
            f"{where}: field {min(lacks, key=len)[0]!r} is missing; expected the fields of a"
            f" {task.name} item. Set data.task to the task of these files, or repair the file"
        )
    template = fitting[0].input
    fields = {
        name: as_text(item[name], name, where) for name in slots(template + fitting[0].output)
    }
    source, output = (fill(each, **fields).strip() for each in (template, fitting[0].output))
    if not output or (template and not source and all(each.input for each in alternatives)):
        return None
    return Example(item_id, source, output)


def as_text(value: Any, name: str, where: str) -> str:
    """Return a field as text: a number as people write it (5.0 is "5"), null as nothing.

    Raises
    ------
    PerPcsError
        If it is neither text nor a number.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PerPcsError(
            f"{where}: field {name!r} is {type(value).__name__}; expected text or a number."
            " Repair the file"
        )
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else repr(value)
    return _without_halves(value) if isinstance(value, str) else str(value)


def _without_halves(text: str) -> str:
    """Replace halves of surrogate pairs: JSON can escape them, but no tokenizer takes them.

    They are left where a text was cut to a length in the middle of an emoji.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
