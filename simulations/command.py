"""What the commands of studies share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_perpcs.cli_words import errors_as_messages

if TYPE_CHECKING:
    from simulations.study import Study

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML study file.")]
Out = Annotated[Path | None, typer.Option(help="The study's folder; by default studies/NAME.")]
Show = Annotated[bool, typer.Option(help="Show each run's own progress.")]
NoRun = Annotated[bool, typer.Option("--no-run", help="Only write tables and figures again.")]


def carry_out(
    study: Path, out: Path | None, show: bool, no_run: bool, write: Callable[["Study", Path], Path]
) -> None:
    """Make a study's runs, then write what came out and print its table.

    Parameters
    ----------
    study : Path
        The study file.
    out : Path, optional
        The study's folder.
    show, no_run : bool
        As the options.
    write : callable
        Writes tables and figures into the folder and returns the table's file.
    """
    with errors_as_messages():
        # Here, so that --help is instant.
        from simulations.running import run_study
        from simulations.study import load_study

        found = load_study(study)
        folder = (out or Path("studies") / found.name).absolute()
        if not no_run:
            run_study(found, folder, typer.echo, show=show)
        typer.echo(write(found, folder).read_text(encoding="utf-8"))
        typer.echo(f"written: {folder}")
