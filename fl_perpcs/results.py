"""The result table: from what users reported and answered to ``results.json``.

A metric is taken over all answers of all targets together, as LaMP's evaluator does, so users
with more queries count for more; each user's own value is there too.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_perpcs.intervals import draw_users, interval
from fl_perpcs.runs import read_lines
from fl_perpcs.seeds import derive_seed
from fl_perpcs.tasks import Task
from fl_perpcs.tasks.metrics import METRICS, statistics

if TYPE_CHECKING:
    from fl_perpcs.phases import Setting

PREFIX = "evaluate "
LOSS = "loss"
ANSWERS = {
    "generate": "answers generated",
    "rank": "labels ranked by likelihood",
    "none": "loss only, no answers",
}
"""The ways of answering, ``evaluation.answers``, in words."""

COSTS = ("forward-examples", "backward-examples", "trained-parameters", "stored-bytes")
"""What a method costs a target before its queries: examples that went forward through the base
LLM and back, numbers that were trained, and bytes that it keeps of its own."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sums:
    """What a metric is a function of, for each user.

    Attributes
    ----------
    value : callable
        (sums, counts) to the metric, as ``Metric.value``.
    sums : ndarray
        (users, statistics).
    counts : ndarray
        (users,), answers or, for the loss, response tokens.
    """

    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    sums: np.ndarray
    counts: np.ndarray

    def overall(self) -> float | None:
        """Return the metric over all users together; None over nothing."""
        total = self.counts.sum()
        return _number(self.value(self.sums.sum(0), total)) if total else None

    def by_user(self) -> list[float | None]:
        """Return each user's metric; None over nothing."""
        values = self.value(self.sums, self.counts)
        return [
            _number(value) if count else None
            for value, count in zip(values, self.counts, strict=True)
        ]


def result_table(
    rows: Sequence[Row],
    answers: Mapping[str, Sequence[Row]],
    task: Task,
    *,
    resamples: int = 0,
    seed: int = 0,
) -> list[Row]:
    """Return the results of each method.

    Parameters
    ----------
    rows : sequence of dict
        The lines of ``metrics.jsonl``.
    answers : mapping of str to sequence of dict
        For each method the lines of ``predictions/<method>.jsonl``; a method may have none.
    task : Task
    resamples : int
        Bootstrap draws of the users behind the intervals; 0: no intervals.
    seed : int
        Of the draws, which all methods share.

    Returns
    -------
    list of dict
        For each method ``users``, ``queries``, ``dropped`` (queries left out of the loss, which
        do not fit ``lm.max-length`` with their gold outputs), ``loss`` (nats per response
        token, over all tokens; None over none), ``metrics`` (over all answers), ``intervals``
        (metric or ``loss`` to [low, high]), ``by_user`` (user to metric or ``loss`` to value),
        ``costs`` (means over targets of what it took to get ready for the queries, by
        :data:`COSTS`) and ``gain``: the share of OPPU's gain over the base LLM in the main
        metric, or None without both.
    """
    methods = reports_by_method(rows)
    table: list[Row] = []
    # From no personalization to one adapter per user, whatever ran first.
    order = sorted(methods, key=lambda method: (method == "oppu") - (method == "base"))
    for method in order:
        reports = methods[method]
        sums = user_sums(reports, answers.get(method, ()), task)
        overall = {name: found.overall() for name, found in sums.items()}
        table.append(
            {
                "method": method,
                "users": len(reports),
                "queries": sum(int(row["queries"]) for row in reports),
                "dropped": sum(int(row.get("dropped", 0)) for row in reports),
                "loss": overall.pop(LOSS),
                "metrics": {name: value for name, value in overall.items() if value is not None},
                "intervals": _intervals(sums, draw_users(len(reports), resamples, seed)),
                "costs": mean_costs(reports),
                "by_user": _by_user([row["user"] for row in reports], sums),
            }
        )
    main = main_metric(table, task)
    values = {row["method"]: row["metrics"].get(main, row["loss"]) for row in table}
    for row in table:
        row["gain"] = _gain(values, row["method"])
    return table


def reports_by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return for each method what its targets reported, out of the lines of ``metrics.jsonl``.

    What a target paid in the exchange before is part of its costs.
    """
    methods: dict[str, list[Row]] = {}
    paid: dict[str, dict[str, int]] = {}
    for row in rows:
        before = paid.get(row["user"], {})
        costs = {c: row.get(c, 0) + before.get(c, 0) for c in COSTS if c in row or c in before}
        if row["phase"].startswith(PREFIX) and "tokens" in row:
            paid.pop(row["user"], None)
            methods.setdefault(row["phase"].removeprefix(PREFIX), []).append({**row, **costs})
        else:
            paid[row["user"]] = costs
    return methods


def mean_costs(reports: Sequence[Row]) -> dict[str, float]:
    """Return the mean over targets of each of :data:`COSTS`."""
    return {cost: sum(row.get(cost, 0) for row in reports) / len(reports) for cost in COSTS}


def history_dropped(rows: Sequence[Row]) -> dict[str, int]:
    """Return for each phase how many examples were too long to train on or look at, if any."""
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["phase"]] = totals.get(row["phase"], 0) + int(row.get("history-dropped", 0))
    return {phase: total for phase, total in totals.items() if total}


def main_metric(table: Sequence[Row], task: Task) -> str:
    """Return the metric that gains are told in: the task's first, or ``loss`` without it."""
    first = task.metrics[0]
    return first if table and first in table[0]["metrics"] else LOSS


def lower_is_better(name: str) -> bool:
    """Tell whether smaller values of a metric, or of the loss, are better."""
    return name == LOSS or (name in METRICS and not METRICS[name].higher_is_better)


def titled(name: str) -> str:
    """Return a metric's name as the head of a column: an arrow where lower is better."""
    return f"{name} ↓" if lower_is_better(name) else name


def write_results(setting: "Setting", task: Task) -> list[Row]:
    """Write ``results.json`` and return its table."""
    run, roles, config = setting.run, setting.roles, setting.config
    rows = read_lines(run.folder / "metrics.jsonl")
    answers = {
        path.stem: read_lines(path) for path in sorted((run.folder / "predictions").glob("*.jsonl"))
    }
    table = result_table(
        rows,
        answers,
        task,
        resamples=config.evaluation.resamples,
        seed=derive_seed(config.seed, "intervals"),
    )
    run.write_json(
        "results.json",
        {
            "task": task.name,
            "title": task.title,
            "lamp_id": task.lamp.id if task.lamp else "",
            "labels": list(task.labels),
            "metrics": list(task.metrics),
            "answers": config.evaluation.answers,
            "methods": table,
            "main_metric": main_metric(table, task),
            "history_dropped": history_dropped(rows),
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


def user_sums(reports: Sequence[Row], answers: Sequence[Row], task: Task) -> dict[str, Sums]:
    """Return what the loss and the task's metrics are made of, users as in the reports."""
    tokens = np.array([row["tokens"] for row in reports], dtype=float)
    loss = np.array([row["loss"] for row in reports], dtype=float) * tokens
    found = {LOSS: Sums(_ratio, loss[:, None], tokens)}
    answered = [row for row in answers if "prediction" in row]
    if not answered:
        return found
    number = {row["user"]: index for index, row in enumerate(reports)}
    users = np.array([number[row["user"]] for row in answered])
    counts = np.bincount(users, minlength=len(reports)).astype(float)
    predictions = [row["prediction"] for row in answered]
    golds = [row["gold"] for row in answered]
    for name in task.metrics:
        each = statistics(name, predictions, golds, task.labels)
        sums = np.zeros((len(reports), each.shape[1]))
        np.add.at(sums, users, each)
        found[name] = Sums(METRICS[name].value, sums, counts)
    return found


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return sums[..., 0] / np.maximum(counts, 1)


def _number(value: Any) -> float | None:
    """Return a number that JSON has; a loss that overflowed is none."""
    return float(value) if np.isfinite(value) else None


def _intervals(sums: Mapping[str, Sums], draws: np.ndarray) -> dict[str, list[float]]:
    found = {name: interval(s.value, s.sums, s.counts, draws) for name, s in sums.items()}
    return {name: ends for name, ends in found.items() if ends is not None}


def _by_user(users: Sequence[str], sums: Mapping[str, Sums]) -> dict[str, dict[str, float]]:
    values = {name: found.by_user() for name, found in sums.items()}
    return {
        user: {name: value for name in values if (value := values[name][index]) is not None}
        for index, user in enumerate(users)
    }


def _gain(values: Mapping[str, float | None], method: str) -> float | None:
    base, oppu, own = values.get("base"), values.get("oppu"), values[method]
    if base is None or oppu is None or own is None or math.isclose(base, oppu, abs_tol=1e-12):
        return None
    return (own - base) / (oppu - base)
