"""What methods send and what it buys: ``python -m simulations.communication STUDY [--out FOLDER]``.

Every method and seed is a Flower run with a ledger, resumed like those of
:mod:`simulations.compare`. The folder then gets ``communication.json``, ``communication.md`` and
``pareto.png``.
"""

import json
from pathlib import Path
from typing import Any

import typer

from fl_perpcs.errors import PerPcsError
from fl_perpcs.exchange.costs import Cost
from fl_perpcs.ledger import FILE, read_ledger
from fl_perpcs.results import LOSS
from fl_perpcs.runs import open_run, write_atomically
from simulations.command import NoRun, Out, Show, StudyFile, carry_out
from simulations.drawing import pareto_figure
from simulations.running import run_folder
from simulations.scoring import score_study
from simulations.study import Study
from simulations.tables import traffic_table
from simulations.traffic import PARTS, expected, facts_of, first_contact, measured, part_of

Row = dict[str, Any]


def main(study: StudyFile, out: Out = None, show: Show = False, no_run: NoRun = False) -> None:
    """Run a study and write what every method sends and how good it is."""
    carry_out(study, out, show, no_run, write_communication)


def write_communication(study: Study, folder: Path) -> Path:
    """Write ``communication.json``, ``communication.md`` and ``pareto.png``."""
    rows = score_study(study, folder)
    for row in rows:
        row["traffic"] = traffic_of(study, folder, row["method"])
    ends = [row for row in rows if row["method"] in (study.base, study.oppu)]
    rows = [row for row in rows if row["traffic"]]
    if not rows:
        raise PerPcsError(f"no run in {folder} has a ledger; run the study again in a new folder")
    metric = next((name for name in rows[0]["scores"] if name != LOSS), LOSS)
    write_atomically(folder / "communication.json", json.dumps(rows, indent=1))
    write_atomically(folder / "communication.md", traffic_table(rows, metric))
    drawn = [row for row in rows if row["method"] in study.pareto] or rows
    pareto_figure(drawn, ends, list(dict.fromkeys((LOSS, metric))), folder / "pareto.png")
    return folder / "communication.md"


def traffic_of(study: Study, out: Path, method: str) -> Row:
    """Return a method's mean traffic over the seeds; {} if a run is older than the ledger.

    Returns
    -------
    dict of str to float
        ``down`` and ``up``: bytes of arrays of one target, without the task adapter that every
        user is sent once; ``wire``: all of its messages as serialized, without reports;
        ``round-trips``; ``shared``: bytes that one sharer sends in all, ``received``: that it is
        sent; ``off``: the largest relative error of the closed form over parts and directions.
    """
    found: list[Row] = []
    for seed in study.seeds:
        folder = run_folder(out, seed, method)
        if not (folder / FILE).is_file():
            return {}
        config, entries, facts = open_run(folder)[1], read_ledger(folder), facts_of(folder)
        counted, told = measured(entries), expected(config, facts)
        target, sharing = counted["targets"], counted["sharing"]
        once = first_contact(config, facts)
        serialized = sum(e.wire - e.report for e in entries if part_of(e) == "targets")
        found.append(
            {
                "down": target.down / facts.targets - once,
                "up": target.up / facts.targets,
                "wire": serialized / facts.targets - once,
                "round-trips": target.round_trips,
                "shared": sharing.up / facts.sharers,
                "received": sharing.down / facts.sharers,
                "off": max(_off(counted[part], told[part]) for part in PARTS),
            }
        )
    means = {key: sum(row[key] for row in found) / len(found) for key in found[0]}
    return {**means, "off": max(row["off"] for row in found)}


def _off(counted: Cost, told: Cost) -> float:
    """Return the larger relative error of both directions."""
    pairs = ((counted.down, told.down), (counted.up, told.up))
    return max(abs(b - a) / a if a else float(b != 0) for a, b in pairs)


if __name__ == "__main__":
    typer.run(main)
