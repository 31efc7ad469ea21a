"""The command line. torch, Flower and transformers are imported inside the commands only."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_perpcs import __version__, cli_data
from fl_perpcs.cli_words import ConfigWords, errors_as_messages, read_config, read_words
from fl_perpcs.errors import PerPcsError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="Personalized Pieces (Per-Pcs) as a federated-learning simulation on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_data.app, name="data")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Personalized Pieces (Per-Pcs) as a federated-learning simulation on Flower."""
    if version:
        typer.echo(f"perpcs {__version__}")
        raise typer.Exit


@app.command()
def run(words: ConfigWords = None) -> None:
    """Run a simulation and print its results."""
    with errors_as_messages():
        from fl_perpcs.launcher import launch

        finished = launch(read_words(words or []))
        typer.echo(f"completed: {finished.folder}")
        if (finished.folder / "results.json").exists():
            _print_results(finished.folder)
        if (report_file := finished.folder / "report.html").exists():
            typer.echo(f"report: {report_file}")


@app.command()
def config(words: ConfigWords = None) -> None:
    """Check a run config and print it with every default filled in."""
    with errors_as_messages():
        import tomli_w

        typer.echo(tomli_w.dumps(read_config(words).model_dump(by_alias=True)), nl=False)


@app.command()
def results(run_folder: RunFolder) -> None:
    """Print a run's result table."""
    with errors_as_messages():
        _print_results(run_folder)


@app.command()
def report(run_folder: RunFolder) -> None:
    """Write a run's report again and print where it is."""
    with errors_as_messages():
        from fl_perpcs.report import write_report

        typer.echo(write_report(run_folder))


@app.command()
def export(
    run_folder: RunFolder,
    user: Annotated[str, typer.Argument(metavar="USER", help="A target's id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
) -> None:
    """Write a target's assembled adapter as a PEFT folder."""
    with errors_as_messages():
        from fl_perpcs.export import export_adapter

        typer.echo(export_adapter(run_folder, user, out))


@app.command()
def predictions(
    run_folder: RunFolder,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="For example assembled.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    task_id: Annotated[str, typer.Option(help="The task's name in the files, if another.")] = "",
) -> None:
    """Write a method's answers and the golds as files for LaMP's evaluator."""
    with errors_as_messages():
        from fl_perpcs.predictions import export_predictions

        if export_predictions(run_folder, method, out, task_id):
            typer.echo("perpcs: users share query ids; all ids are written as user/id", err=True)
        typer.echo(out)


@app.command()
def fetch(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="smollm2, minilm, debian-synopsis or lamp.")
    ],
    task: Annotated[str, typer.Option(help="lamp: the task, for example LaMP-2M.")] = "",
    split: Annotated[str, typer.Option(help="lamp: train, dev or test.")] = "train",
    separation: Annotated[str, typer.Option(help="lamp: by user or by time.")] = "user",
    url: Annotated[str, typer.Option(help="lamp: the folder on another server.")] = "",
) -> None:
    """Download a model (smollm2, minilm) or real users (debian-synopsis, lamp)."""
    with errors_as_messages():
        from fl_perpcs import fetch as fetching

        if what == "lamp":
            typer.echo(fetching.fetch_lamp(task, split, separation, url))
            return
        plain: dict[str, Callable[[], Path]] = {
            "smollm2": fetching.fetch_smollm2,
            "minilm": fetching.fetch_minilm,
            "debian-synopsis": fetching.fetch_debian_synopsis,
        }
        if what not in plain:
            raise PerPcsError(
                f"{what!r} cannot be fetched; expected one of {', '.join(plain)}, lamp"
            )
        if task or url:
            raise PerPcsError(f"--task and --url go with lamp only; run: perpcs fetch {what}")
        typer.echo(plain[what]())


def _print_results(folder: Path) -> None:
    from rich.console import Console

    from fl_perpcs.runs import read_json

    found = read_json(folder / "results.json")
    if not found.get("methods"):
        raise PerPcsError(f"{folder / 'results.json'} has no methods; run the simulation again")
    wide = Console(width=1000)
    console = Console() if sys.stdout.isatty() else wide  # a reader of files breaks no lines
    table = _result_table(folder.name, found, " ")
    if wide.measure(table).maximum > console.width:
        table = _result_table(folder.name, found, "\n")
    console.print(table)


def _result_table(name: str, found: dict[str, Any], space: str) -> "Table":
    """Lay a result table out, with a space or a new line between values and intervals."""
    from rich.table import Table
    from rich.text import Text

    from fl_perpcs.results import ANSWERS, LOSS, titled

    rows = found["methods"]
    metrics = sorted({name for row in rows for name in row["metrics"]})
    metrics.sort(key=lambda name: name != found.get("main_metric"))
    # What is the same for all methods is said once, below the table.
    counts = {name: {row.get(name, 0) for row in rows} for name in ("users", "queries", "dropped")}
    notes = [f"{min(c)} {name}" for name, c in counts.items() if len(c) == 1 and c != {0}]
    counts = {name: c for name, c in counts.items() if len(c) > 1}
    if any(row.get("intervals") for row in rows):
        notes.append("[low, high]: 95 % bootstrap interval over users")
    if left_out := found.get("history_dropped"):
        phases = ", ".join(f"{count} in {phase!r}" for phase, count in left_out.items())
        notes.append(f"history items too long for lm.max-length: {phases}")
    parts = [name, found.get("title") or found.get("task"), ANSWERS.get(found.get("answers", ""))]
    table = Table(
        title=Text(" · ".join(part for part in parts if part)), caption=Text("; ".join(notes))
    )
    table.add_column("method")
    for column in (*counts, *map(titled, (LOSS, *metrics)), "gain (% of\nOPPU's)"):
        table.add_column(column, justify="right")
    for row in rows:
        values = {LOSS: row["loss"]} | {name: row["metrics"].get(name) for name in metrics}
        ends = row.get("intervals", {})
        table.add_row(
            Text(row["method"]),
            *(str(row.get(count, 0)) for count in counts),
            *(Text(space.join(_value(v, ends.get(name)))) for name, v in values.items()),
            "-" if row.get("gain") is None else f"{100 * row['gain']:.0f}",
        )
    return table


def _value(value: float | None, ends: list[float] | None) -> list[str]:
    """Return a value and, where there is one, its interval."""
    if value is None:
        return ["-"]
    return [f"{value:.3f}", *([f"[{ends[0]:.3f}, {ends[1]:.3f}]"] if ends else [])]
