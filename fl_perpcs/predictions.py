"""A method's answers in the format of the LaMP benchmark, for its own evaluator.

Accuracy, F1, MAE and RMSE come out as in ``results.json``. For ROUGE the evaluator takes the
median of an unseeded bootstrap (``evaluate``'s ``rouge``), which differs from the mean in the
third digit or so, and from one time to the next.

References
----------
https://github.com/LaMP-Benchmark/LaMP, ``eval/eval_task.py``: ``--task_name`` is the task's id in
both files, and the ids of answers and golds must be the same.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from fl_perpcs.errors import PerPcsError
from fl_perpcs.runs import open_run, read_json, read_lines, write_atomically


def export_predictions(folder: Path, method: str, out: Path, task_id: str = "") -> bool:
    """Write a method's answers as ``predictions.json``, and their golds as ``golds.json``.

    Parameters
    ----------
    folder : Path
        A run folder.
    method : str
        A method that was evaluated.
    out : Path
        The folder to write; must not exist.
    task_id : str
        The task's name in the files; empty: its LaMP id, or without one the task's name.

    Returns
    -------
    bool
        Whether ids have their users before them, ``user/id``, as several users share an id.

    Raises
    ------
    PerPcsError
        If the folder holds no finished run, it has no answers by the method, or ``out`` exists.
    """
    if out.exists():
        raise PerPcsError(f"{out} exists; name a new folder for the predictions")
    open_run(folder)
    results = read_json(folder / "results.json")
    rows = _answers(folder, method)
    task = task_id or results.get("lamp_id") or results.get("task")
    if not task:
        raise PerPcsError(f"the results in {folder} name no task; name it with --task-id")
    ids, prefixed = _ids(rows)
    texts = {
        f"{name}s.json": _lamp_file(str(task), ids, [row[name] for row in rows])
        for name in ("prediction", "gold")
    }
    _write_folder(out, texts)
    return prefixed


def _answers(folder: Path, method: str) -> list[dict[str, Any]]:
    paths = {path.stem: path for path in sorted((folder / "predictions").glob("*.jsonl"))}
    if method not in paths:
        known = ", ".join(paths) or "none"
        raise PerPcsError(f"{folder} has no predictions by {method!r}; it has {known}")
    rows = read_lines(paths[method])
    if not rows or "prediction" not in rows[0]:
        raise PerPcsError(
            f"{folder} has no answers by {method!r}: it was run with evaluation.answers ="
            ' "none"; run it with "generate" or "rank"'
        )
    return rows


def _ids(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return ids that differ, and whether they are the queries' with their users before them."""
    ids = [row["query"] for row in rows]
    if len(set(ids)) == len(ids):
        return ids, False
    ids = [f"{row['user']}/{row['query']}" for row in rows]
    (most, count), *_ = Counter(ids).most_common(1)
    if count > 1:
        raise PerPcsError(f"a user has two queries of one id, {most!r}; expected ids that differ")
    return ids, True


def _lamp_file(task: str, ids: list[str], outputs: list[str]) -> str:
    golds = [{"id": i, "output": output} for i, output in zip(ids, outputs, strict=True)]
    return json.dumps({"task": task, "golds": golds}, ensure_ascii=False, indent=1)


def _write_folder(out: Path, texts: dict[str, str]) -> None:
    """Write files into a new folder, all or none."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, text in texts.items():
            write_atomically(temporary / name, text)
        temporary.replace(out)
    except OSError as error:
        raise PerPcsError(
            f"{out} cannot be written ({error.strerror}); name a folder that you can write to"
        ) from None
