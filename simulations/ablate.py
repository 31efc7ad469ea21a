"""Change one setting at a time: ``python -m simulations.ablate STUDY [--out FOLDER]``.

The study's baseline runs with each value of each key in ``[ablations]``, as Flower runs that are
resumed like those of :mod:`simulations.compare`. The folder then gets ``ablate.json``,
``ablate.md`` and a figure for each key.
"""

import json
from pathlib import Path

import typer

from fl_perpcs.results import LOSS
from fl_perpcs.runs import write_atomically
from simulations.command import NoRun, Out, Show, StudyFile, carry_out
from simulations.drawing import ablation_figure
from simulations.scoring import score_study
from simulations.study import Study
from simulations.tables import comparison_table


def main(study: StudyFile, out: Out = None, show: Show = False, no_run: NoRun = False) -> None:
    """Run a study's ablations for all its seeds and write tables and figures."""
    carry_out(study, out, show, no_run, write_ablations)


def write_ablations(study: Study, folder: Path) -> Path:
    """Write ``ablate.json``, ``ablate.md`` and ``<key>.png`` for each key."""
    found, text = {}, []
    for key, values in study.ablations.items():
        rows = score_study(study, folder, [study.ablated(key, value) for value in values])
        metric = next((name for name in rows[0]["scores"] if name != LOSS), LOSS)
        found[key] = rows
        text.append(f"## {key}\n\n{comparison_table(rows, metric)}")
        title = study.titles.get(key, key)
        ablation_figure(title, values, rows, metric, folder / f"{key}.png")
    write_atomically(folder / "ablate.json", json.dumps(found, indent=1))
    write_atomically(folder / "ablate.md", "\n".join(text))
    return folder / "ablate.md"


if __name__ == "__main__":
    typer.run(main)
