"""Change one setting at a time: ``python -m simulations.ablate STUDY [--out FOLDER]``.

The study's baseline runs with each value of each key in ``[ablations]``, as Flower runs that are
resumed like those of :mod:`simulations.compare`. The folder then gets ``ablate.json``,
``ablate.md`` and a figure for each key.
"""

import json
from pathlib import Path

import typer

from fl_perpcs.cli_words import errors_as_messages
from fl_perpcs.results import LOSS
from fl_perpcs.runs import write_atomically
from simulations.compare import Out, RunNothing, Show, StudyFile


def main(study: StudyFile, out: Out = None, show: Show = False, no_run: RunNothing = False) -> None:
    """Run a study's ablations for all its seeds and write tables and figures."""
    with errors_as_messages():
        from simulations.running import run_study
        from simulations.study import load_study

        found = load_study(study)
        folder = (out or Path("studies") / found.name).absolute()
        if not no_run:
            run_study(found, folder, typer.echo, show=show)
        write_ablations(study, folder)
        typer.echo((folder / "ablate.md").read_text(encoding="utf-8"))
        typer.echo(f"written: {folder}")


def write_ablations(path: Path, folder: Path) -> None:
    """Write ``ablate.json``, ``ablate.md`` and ``<key>.png`` for each key."""
    from simulations.drawing import ablation_figure
    from simulations.scoring import score_study
    from simulations.study import load_study
    from simulations.tables import comparison_table

    study = load_study(path)
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


if __name__ == "__main__":
    typer.run(main)
