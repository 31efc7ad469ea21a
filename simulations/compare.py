"""Compare methods: ``python -m simulations.compare STUDY [--out FOLDER]``.

Every method runs once for each seed as a Flower run of its own; finished runs are not repeated, so
that an interrupted study goes on where it stopped. The folder then gets ``<study>.json``,
``<study>.md`` and figures; studies may share a folder and the runs that they have in common.
"""

import json
from pathlib import Path

import typer

from fl_perpcs.results import LOSS
from fl_perpcs.runs import write_atomically
from simulations.command import NoRun, Out, Show, StudyFile, carry_out
from simulations.drawing import cost_figure, hubness_figure, quality_figure
from simulations.scoring import first_choices, own_group_share, score_study
from simulations.study import Study
from simulations.tables import comparison_table, rival_table


def main(study: StudyFile, out: Out = None, show: Show = False, no_run: NoRun = False) -> None:
    """Run a study's methods for all its seeds and write one table and figures."""
    carry_out(study, out, show, no_run, write_comparison)


def write_comparison(study: Study, folder: Path) -> Path:
    """Write ``<study>.json``, ``.md``, ``-quality.png``, ``-costs.png`` and ``-hubness.png``."""
    rows = score_study(study, folder)
    metric = next((name for name in rows[0]["scores"] if name != LOSS), LOSS)
    write_atomically(folder / f"{study.name}.json", json.dumps(rows, indent=1))
    metrics = list(dict.fromkeys((LOSS, metric)))
    text = f"{comparison_table(rows, metric)}\n{rival_table(rows, metrics)}"
    write_atomically(folder / f"{study.name}.md", text)
    quality_figure(rows, metrics, study.baseline, folder / f"{study.name}-quality.png")
    for name in (metric, LOSS):
        if all(row["scores"][name]["gain"] is not None for row in rows):
            cost_figure(rows, name, folder / f"{study.name}-costs.png")
            break
    choices, notes = {}, {}
    for method in study.hubness:
        choices[method] = first_choices(study, folder, method)
        share = own_group_share(study, folder, method)
        notes[method] = "" if share is None else f"{share:.0%} from the own community"
    if choices:
        hubness_figure(choices, notes, folder / f"{study.name}-hubness.png")
    return folder / f"{study.name}.md"


if __name__ == "__main__":
    typer.run(main)
