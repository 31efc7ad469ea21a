"""Compare methods: ``python -m simulations.compare STUDY [--out FOLDER]``.

Every method runs once for each seed as a Flower run of its own; finished runs are not repeated, so
that an interrupted study goes on where it stopped. The folder then gets ``compare.json``,
``compare.md`` and figures.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from fl_perpcs.cli_words import errors_as_messages
from fl_perpcs.results import LOSS
from fl_perpcs.runs import write_atomically

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML study file.")]
Out = Annotated[Path | None, typer.Option(help="The study's folder; by default studies/NAME.")]
Show = Annotated[bool, typer.Option(help="Show each run's own progress.")]
RunNothing = Annotated[bool, typer.Option("--no-run", help="Only write table and figures again.")]


def main(study: StudyFile, out: Out = None, show: Show = False, no_run: RunNothing = False) -> None:
    """Run a study's methods for all its seeds and write one table and figures."""
    with errors_as_messages():
        from simulations.running import run_study
        from simulations.study import load_study

        found = load_study(study)
        folder = (out or Path("studies") / found.name).absolute()
        if not no_run:
            run_study(found, folder, typer.echo, show=show)
        write_comparison(study, folder)
        typer.echo((folder / "compare.md").read_text(encoding="utf-8"))
        typer.echo(f"written: {folder}")


def write_comparison(path: Path, folder: Path) -> None:
    """Write ``compare.json``, ``compare.md``, ``quality.png``, ``costs.png``, ``hubness.png``."""
    from simulations.drawing import cost_figure, hubness_figure, quality_figure
    from simulations.scoring import first_choices, own_group_share, score_study
    from simulations.study import load_study
    from simulations.tables import comparison_table, rival_table

    study = load_study(path)
    rows = score_study(study, folder)
    metric = next((name for name in rows[0]["scores"] if name != LOSS), LOSS)
    write_atomically(folder / "compare.json", json.dumps(rows, indent=1))
    metrics = list(dict.fromkeys((LOSS, metric)))
    text = f"{comparison_table(rows, metric)}\n{rival_table(rows, metrics)}"
    write_atomically(folder / "compare.md", text)
    quality_figure(rows, metrics, study.baseline, folder / "quality.png")
    for name in (metric, LOSS):
        if all(row["scores"][name]["gain"] is not None for row in rows):
            cost_figure(rows, name, folder / "costs.png")
            break
    choices, notes = {}, {}
    for method in study.hubness:
        choices[method] = first_choices(study, folder, method)
        share = own_group_share(study, folder, method)
        notes[method] = "" if share is None else f"{share:.0%} from the own community"
    if choices:
        hubness_figure(choices, notes, folder / "hubness.png")


if __name__ == "__main__":
    typer.run(main)
