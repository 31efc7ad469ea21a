"""The result table: from what users reported to ``results.json``."""

from collections.abc import Sequence
from typing import Any

from fl_perpcs.phases import Setting
from fl_perpcs.runs import read_lines
from fl_perpcs.tasks import Task

PREFIX = "evaluate "


def result_table(rows: Sequence[dict[str, Any]], task: Task) -> list[dict[str, Any]]:
    """Average the targets' metrics for each method.

    Parameters
    ----------
    rows : sequence of dict
        The lines of ``metrics.jsonl``.
    task : Task

    Returns
    -------
    list of dict
        For each method ``users``, ``queries``, ``loss`` (nats per response token, over all
        tokens), ``metrics`` (means over users, as each user counts once) and ``gain``: the
        share of OPPU's gain over the base LLM in the main metric, or None without both.
    """
    methods: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["phase"].startswith(PREFIX) and "tokens" in row:
            methods.setdefault(row["phase"].removeprefix(PREFIX), []).append(row)
    table = []
    for method, found in methods.items():
        tokens = sum(row["tokens"] for row in found)
        table.append(
            {
                "method": method,
                "users": len(found),
                "queries": sum(int(row["queries"]) for row in found),
                "loss": sum(row["loss"] * row["tokens"] for row in found) / max(tokens, 1),
                "metrics": {
                    name: sum(row[name] for row in found) / len(found)
                    for name in task.metrics
                    if name in found[0]
                },
            }
        )
    main = main_metric(table, task)
    values = {row["method"]: row["metrics"].get(main, row["loss"]) for row in table}
    for row in table:
        row["gain"] = _gain(values, row["method"])
    return table


def main_metric(table: Sequence[dict[str, Any]], task: Task) -> str:
    """Return the metric that gains are told in: the task's first, or ``loss`` without it."""
    first = task.metrics[0]
    return first if table and first in table[0]["metrics"] else "loss"


def write_results(setting: Setting, task: Task) -> list[dict[str, Any]]:
    """Write ``results.json`` and return its table."""
    run, roles = setting.run, setting.roles
    table = result_table(read_lines(run.folder / "metrics.jsonl"), task)
    run.write_json(
        "results.json",
        {
            "task": task.name,
            "methods": table,
            "main_metric": main_metric(table, task),
            "roles": {
                "base": roles.base,
                "candidates": roles.candidates,
                "targets": roles.targets,
            },
            "groups": {user: member.group for user, member in setting.members.items()},
            "history": {user: member.history for user, member in setting.members.items()},
        },
    )
    return table


def _gain(values: dict[str, float], method: str) -> float | None:
    if not {"base", "oppu"} <= values.keys() or values["base"] == values["oppu"]:
        return None
    return (values[method] - values["base"]) / (values["oppu"] - values["base"])
