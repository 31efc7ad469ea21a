"""What a report says: read from a run folder and counted, nothing drawn yet."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.ledger import DOWN, UP, Entry, read_ledger
from fl_perpcs.ledger import FILE as LEDGER
from fl_perpcs.results import LOSS, lower_is_better
from fl_perpcs.runs import open_run, read_lines

BASE = "base"

Scores = dict[str, dict[str, dict[str, float]]]
Recipes = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Facts:
    """A run, as far as its report needs it; parts that the run lacks are empty."""

    config: Config
    versions: dict[str, Any]
    results: dict[str, Any]
    status: str
    phases: list["Phase"]
    rows: list[dict[str, Any]]
    scores: Scores
    """``scores[method][user][metric]``, loss among the metrics."""
    pool: dict[str, Any]
    """``sharers``, ``bytes``, ``sites`` and, if counted, ``pieces``."""
    choices: "Choices | None"
    traffic: list["Traffic"] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Sharers that were not let into the pool, and why."""

    @property
    def main_metric(self) -> str:
        """The metric that the run is judged by; ``loss`` where there is no other."""
        return str(self.results.get("main_metric") or LOSS)

    @property
    def methods(self) -> list[str]:
        """The evaluated methods in the order of the result table."""
        return [row["method"] for row in self.results.get("methods", [])]

    @property
    def groups(self) -> dict[str, str]:
        """Each user's group; empty where none is known."""
        return self.results.get("groups") or {}

    def role(self, name: str) -> list[str]:
        """Return the ids of the users in a role."""
        return list((self.results.get("roles") or {}).get(name, []))


@dataclass(frozen=True)
class Phase:
    """A phase as the progress log shows it; rounds of one name are one phase."""

    name: str
    seconds: float
    users: int


@dataclass(frozen=True)
class Choices:
    """Who picked whose pieces.

    ``weights[l, t, s]`` is the weight of sharer ``s`` in the recipe of target ``t``, averaged
    over the sites of layer ``layers[l]``; ``overall[t, s]`` is averaged over all sites, and
    ``first[t, s]`` counts the sites where ``s`` has the greatest weight (ties are split).
    """

    targets: list[str]
    target_groups: list[str]
    sharers: list[str]
    sharer_groups: list[str]
    layers: list[int]
    weights: NDArray[np.float64]
    overall: NDArray[np.float64]
    first: NDArray[np.float64]

    @property
    def same_group(self) -> NDArray[np.bool_]:
        """A mask over targets and sharers: both belong to the same known group."""
        rows, columns = np.array(self.target_groups), np.array(self.sharer_groups)
        same: NDArray[np.bool_] = (rows[:, None] == columns) & (rows[:, None] != "")
        return same

    @property
    def groups_differ(self) -> bool:
        """Whether some sharers are of a target's own group and some are not."""
        return bool(self.same_group.any() and not self.same_group.all())


class Traffic(NamedTuple):
    """Bytes of a phase as serialized, over all its users; ``report`` is what is only for us."""

    phase: str
    users: int
    down: int
    up: int
    report: int


def read_facts(folder: Path) -> Facts:
    """Read a finished run's folder.

    Raises
    ------
    PerPcsError
        If the folder holds no run, one that did not finish, or a damaged file.
    """
    _, config = open_run(folder)
    if not (folder / "results.json").is_file():
        raise PerPcsError(
            f"the run in {folder} did not finish: it has no results.json;"
            " run it again, or look into its events.jsonl for where it stopped"
        )
    results = _read(folder / "results.json", {})
    events = _read(folder / "events.jsonl", [])
    rows = _read(folder / "metrics.jsonl", [])
    recipes = _read(folder / "recipes.json", {})
    manifest = _read(folder / "pool" / "manifest.json", {})
    sharers = [row["sharer"] for row in manifest.get("sharers", [])]
    # The run writes its report just before it says that it is complete.
    statuses = [str(event.get("status", "")) for event in events if event.get("event") == "run"]
    statuses = [status for status in statuses if status != "started"]
    targets = (results.get("roles") or {}).get("targets", [])
    groups = results.get("groups") or {}
    return Facts(
        config=config,
        versions=_read(folder / "versions.json", {}),
        results=results,
        status=statuses[-1] if statuses else "",
        phases=phases(events),
        rows=rows,
        scores=scores(results),
        pool=results.get("pool") or _pool(folder / "pool", manifest),
        choices=choices(recipes, results.get("sharers") or sharers, targets, groups),
        traffic=traffic(read_ledger(folder)) if (folder / LEDGER).is_file() else [],
        refused=_read(folder / "refused.json", {}),
    )


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        if path.suffix == ".jsonl":
            return read_lines(path)
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PerPcsError(f"{path} is damaged ({error}); run the simulation again") from None


def _pool(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a pool folder says of itself; nothing if there is none."""
    if not manifest:
        return {}
    return {
        "sharers": len(manifest.get("sharers", [])),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "sites": list(manifest.get("sites", [])),
    }


def phases(events: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Return the phases in the order they began.

    A phase lasts from its first to its last line; if that first line already counts a user,
    from the line before it.
    """
    seconds: dict[str, float] = defaultdict(float)
    users: dict[str, int] = defaultdict(int)
    before: Mapping[str, Any] | None = None
    for event in events:
        if event.get("event") == "phase":
            name = str(event.get("phase", ""))
            goes_on = before is not None and (
                before.get("phase") == name or event.get("done", 0) > 0
            )
            if before is not None and goes_on:
                seconds[name] += max(0.0, event.get("time", 0.0) - before.get("time", 0.0))
            users[name] = max(users[name], int(event.get("total") or 0))
        before = event
    return [Phase(name, seconds[name], count) for name, count in users.items()]


def traffic(entries: Sequence[Entry]) -> list[Traffic]:
    """Return what each phase sent in both directions, in the order of the ledger."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.phase, []).append(entry)
    return [
        Traffic(
            phase,
            len({entry.user for entry in own}),
            sum(entry.wire for entry in own if entry.direction == DOWN),
            sum(entry.wire for entry in own if entry.direction == UP),
            sum(entry.report for entry in own),
        )
        for phase, own in found.items()
    ]


def scores(results: Mapping[str, Any]) -> Scores:
    """Return ``scores[method][user][metric]`` from a run's results."""
    return {
        row["method"]: {
            user: {name: float(value) for name, value in own.items() if is_number(value)}
            for user, own in row.get("by_user", {}).items()
        }
        for row in results.get("methods", [])
    }


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number (JSON's true and false are none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def gains(found: Scores, method: str, metric: str) -> dict[str, float]:
    """Return by how much each user is better off with a method than with the base LLM.

    Parameters
    ----------
    found : Scores
        From :func:`scores`.
    method, metric : str
        The loss among the metrics.

    Returns
    -------
    dict of str to float
        Users with both values; positive is better.
    """
    sign = -1.0 if lower_is_better(metric) else 1.0
    base = found.get(BASE, {})
    return {
        user: sign * (own[metric] - base[user][metric])
        for user, own in found.get(method, {}).items()
        if metric in own and metric in base.get(user, {})
    }


def choices(
    recipes: Recipes,
    sharers: Sequence[str],
    targets: Sequence[str],
    groups: Mapping[str, str],
) -> Choices | None:
    """Average the recipes.

    Parameters
    ----------
    recipes : mapping
        Target → site → sharer → weight; sites without a piece count nowhere.
    sharers, targets : sequence of str
        The order wanted; ids that only the recipes know come last.
    groups : mapping of str to str
        Users' groups, where known.

    Returns
    -------
    Choices or None
        None if no recipe holds a piece.
    """
    seen = {sharer for sites in recipes.values() for site in sites.values() for sharer in site}
    if not seen:
        return None
    columns = [*sharers, *sorted(seen - set(sharers))]
    picked = [target for target in targets if target in recipes]
    picked += sorted(set(recipes) - set(targets))
    layers = sorted({layer_of(site) for sites in recipes.values() for site in sites})
    column = {sharer: index for index, sharer in enumerate(columns)}
    totals = np.zeros((len(layers), len(picked), len(columns)))
    counts = np.zeros((len(layers), len(picked), 1))
    first = np.zeros((len(picked), len(columns)))
    for row, target in enumerate(picked):
        for site, weights in recipes[target].items():
            if not weights:
                continue
            layer = layers.index(layer_of(site))
            counts[layer, row] += 1
            best = max(weights.values())
            winners = [sharer for sharer, weight in weights.items() if weight == best]
            for sharer, weight in weights.items():
                totals[layer, row, column[sharer]] += weight
            for sharer in winners:
                first[row, column[sharer]] += 1 / len(winners)
    return Choices(
        targets=picked,
        target_groups=[groups.get(user, "") for user in picked],
        sharers=columns,
        sharer_groups=[groups.get(user, "") for user in columns],
        layers=layers,
        weights=totals / np.maximum(counts, 1),
        overall=totals.sum(axis=0) / np.maximum(counts.sum(axis=0), 1),
        first=first,
    )


def layer_of(site: str) -> int:
    """Return the layer number of a site: the first whole number in its dotted name, or 0."""
    return next((int(part) for part in site.split(".") if part.isdecimal()), 0)


def by_group(found: Choices) -> Choices:
    """Put targets and sharers of a group side by side; those without one come last."""

    def order(groups: Sequence[str]) -> list[int]:
        return sorted(range(len(groups)), key=lambda i: (not groups[i], groups[i], i))

    rows, columns = order(found.target_groups), order(found.sharer_groups)
    return Choices(
        targets=[found.targets[i] for i in rows],
        target_groups=[found.target_groups[i] for i in rows],
        sharers=[found.sharers[i] for i in columns],
        sharer_groups=[found.sharer_groups[i] for i in columns],
        layers=found.layers,
        weights=found.weights[:, rows][:, :, columns],
        overall=found.overall[rows][:, columns],
        first=found.first[rows][:, columns],
    )
