"""From the run folders of a study to one table.

Users of all seeds are pooled: a unit is one user in one seed, and a bootstrap draw re-weights
units, the same for every method, so that differences between methods are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_perpcs.data import open_source
from fl_perpcs.errors import PerPcsError
from fl_perpcs.intervals import LEVEL, draw_users
from fl_perpcs.results import Sums, lower_is_better, mean_costs, reports_by_method, user_sums
from fl_perpcs.runs import open_run, read_json, read_lines
from fl_perpcs.seeds import derive_seed
from simulations.running import run_folder
from simulations.study import Study

RESAMPLES = 2000

Row = dict[str, Any]


@dataclass(frozen=True)
class Scores:
    """What a method did over all seeds.

    Attributes
    ----------
    units : list of (int, str)
        Seed and user, in the order of the sums.
    sums : dict of str to Sums
        By metric, and ``loss``.
    costs : dict of str to float
        Means over units.
    """

    units: list[tuple[int, str]]
    sums: dict[str, Sums]
    costs: dict[str, float]


def read_scores(study: Study, out: Path, method: str) -> Scores:
    """Read what a method did in every seed.

    Raises
    ------
    PerPcsError
        If a run is missing.
    """
    units: list[tuple[int, str]] = []
    parts: list[dict[str, Sums]] = []
    reports: list[Row] = []
    for seed in study.seeds:
        folder = run_folder(out, seed, method)
        if not (folder / "results.json").is_file():
            raise PerPcsError(f"{folder} holds no finished run; run the study to its end first")
        run, config = open_run(folder)
        (name, found), *_ = reports_by_method(read_lines(run.folder / "metrics.jsonl")).items()
        answers = run.folder / "predictions" / f"{name}.jsonl"
        parts.append(user_sums(found, read_lines(answers), open_source(config).task))
        units += [(seed, row["user"]) for row in found]
        reports += found
    sums = {
        name: Sums(
            first.value,
            np.concatenate([part[name].sums for part in parts]),
            np.concatenate([part[name].counts for part in parts]),
        )
        for name, first in parts[0].items()
    }
    return Scores(units, sums, mean_costs(reports))


def score_study(study: Study, out: Path, methods: Sequence[str] | None = None) -> list[Row]:
    """Return a row for each method.

    Returns
    -------
    list of dict
        ``method``, ``units``, ``costs`` and, for the loss and each metric under ``scores``:
        ``value``, its ``interval``, ``against`` (for the baseline and each rival the ``difference``
        to it, its ``interval``, and ``better``, the number of units that this method serves
        better) and the ``gain``, the share of OPPU's gain over the base LLM, with its interval.
        Intervals hold 95 % of the bootstrap draws of users; gains are None where the study has no
        base LLM or OPPU.
    """
    names = list(methods or study.methods)
    rivals = list(dict.fromkeys([study.baseline, *study.rivals]))
    wanted = list(dict.fromkeys([*names, *rivals]))
    wanted += [m for m in (study.base, study.oppu) if m in study.methods and m not in wanted]
    scores = {method: read_scores(study, out, method) for method in wanted}
    units = scores[study.baseline].units
    for method, found in scores.items():
        if found.units != units:
            raise PerPcsError(f"method {method!r} has other targets than {study.baseline!r}")
    draws = draw_users(len(units), RESAMPLES, derive_seed(0, "study", study.name))
    rows: list[Row] = [
        {"method": m, "units": len(units), "costs": scores[m].costs, "scores": {}} for m in names
    ]
    for metric in scores[study.baseline].sums:
        values = {m: _value(found.sums[metric], None) for m, found in scores.items()}
        drawn = {m: _value(found.sums[metric], draws) for m, found in scores.items()}
        for row in rows:
            method = row["method"]
            row["scores"][metric] = {
                "value": float(values[method]),
                "interval": _ends(drawn[method]),
                "against": {
                    rival: {
                        "difference": float(values[method] - values[rival]),
                        "interval": _ends(drawn[method] - drawn[rival]),
                        "better": _better(metric, scores[method], scores[rival]),
                    }
                    for rival in rivals
                },
                **_gain(study, method, values, drawn),
            }
    return rows


def first_choices(study: Study, out: Path, method: str) -> list[dict[str, float]]:
    """Return for each seed the share of targets' sites at which each sharer has most weight.

    Returns
    -------
    list of dict
        Sharer to share; sharers that are never first are there with 0.
    """
    found = []
    for seed in study.seeds:
        folder = run_folder(out, seed, method)
        recipes = read_json(folder / "recipes.json")
        sharers = [entry["sharer"] for entry in read_json(folder / "pool/manifest.json")["sharers"]]
        firsts = [
            max(weights, key=weights.__getitem__)
            for recipe in recipes.values()
            for weights in recipe.values()
        ]
        found.append({sharer: firsts.count(sharer) / len(firsts) for sharer in sharers})
    return found


def own_group_share(study: Study, out: Path, method: str) -> float | None:
    """Return the share of first choices from the target's own group; None without groups."""
    same, total = 0, 0
    for seed in study.seeds:
        folder = run_folder(out, seed, method)
        groups = read_json(folder / "results.json")["groups"]
        for user, recipe in read_json(folder / "recipes.json").items():
            for weights in recipe.values():
                same += groups[max(weights, key=weights.__getitem__)] == groups[user]
                total += 1
        if len(set(groups.values())) < 2:
            return None
    return same / total


def _value(sums: Sums, draws: np.ndarray | None) -> np.ndarray:
    """Return the metric over all units, or over those of each draw."""
    if draws is None:
        return sums.value(sums.sums.sum(0), sums.counts.sum())
    drawn = np.einsum("ru,us->rs", draws.astype(float), sums.sums)
    return sums.value(drawn, draws @ sums.counts)


def _better(metric: str, own: Scores, rival: Scores) -> int:
    """Count the units that a method serves better than another."""
    pairs = zip(own.sums[metric].by_user(), rival.sums[metric].by_user(), strict=True)
    sign = -1 if lower_is_better(metric) else 1
    return sum(sign * a > sign * b for a, b in pairs if a is not None and b is not None)


def _ends(values: np.ndarray) -> list[float]:
    outside = (1 - LEVEL) / 2
    return [float(end) for end in np.quantile(values, [outside, 1 - outside])]


def _gain(
    study: Study, method: str, values: Mapping[str, Any], drawn: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    if study.base not in values or study.oppu not in values:
        return {"gain": None, "gain_interval": None}
    base, oppu = values[study.base], values[study.oppu]
    span = drawn[study.oppu] - drawn[study.base]
    some = np.abs(span) > 1e-12
    if abs(oppu - base) < 1e-12 or not some.any():
        return {"gain": None, "gain_interval": None}
    gains = (drawn[method] - drawn[study.base])[some] / span[some]
    return {
        "gain": float((values[method] - base) / (oppu - base)),
        "gain_interval": _ends(gains),
    }
