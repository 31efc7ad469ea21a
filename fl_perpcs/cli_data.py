"""``perpcs data``: look at users' data before a run."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_perpcs.cli_words import ConfigWords, errors_as_messages, read_config

if TYPE_CHECKING:
    from rich.console import Console

    from fl_perpcs.data.check import Check, Spread
    from fl_perpcs.data.show import Shown

app = typer.Typer(help="Look at users' data before a run.", no_args_is_help=True)


@app.command()
def check(
    words: ConfigWords = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report users, lengths, labels, duplicates and leaks; exit 1 if a run could not start."""
    with errors_as_messages():
        from rich.console import Console

        from fl_perpcs.data.check import check_data

        found = check_data(read_config(words), _watched)
        if as_json:
            typer.echo(json.dumps(asdict(found), ensure_ascii=False, indent=1))
        else:
            _print_check(found, Console())
        if found.problems:
            raise typer.Exit(1)


@app.command()
def show(
    user: Annotated[str, typer.Argument(metavar="USER", help="A user's id.")],
    words: ConfigWords = None,
    items: Annotated[int, typer.Option(min=1, help="Last history items, and queries.")] = 5,
) -> None:
    """Print a user's history and queries as the model will see them."""
    with errors_as_messages():
        from rich.console import Console

        from fl_perpcs.data import open_source
        from fl_perpcs.data.show import show_user
        from fl_perpcs.lm import load_tokenizer

        config = read_config(words)
        source = open_source(config)
        source.user(user)  # an unknown user is told before the tokenizer loads
        history, queries = show_user(config, source, user, load_tokenizer(config))
        console = Console(highlight=False)
        for title, found in (("history item", history), ("query", queries)):
            _print_shown(title, found, items, config.lm.max_length, console)


@app.command()
def profiles(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="JSON file, written or completed.")],
    words: ConfigWords = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest profile.")] = 40,
) -> None:
    """Let the base LLM write a profile of every user, for prompts.profiles."""
    with errors_as_messages():
        from rich.console import Console
        from rich.progress import Progress

        from fl_perpcs.profiles import write_profiles

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("writing profiles", total=None)
            write_profiles(
                read_config(words),
                out.expanduser().absolute(),
                max_new_tokens=max_new_tokens,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        typer.echo(out)


def _watched(users: list[str]) -> Iterable[str]:
    from rich.console import Console
    from rich.progress import track

    return track(users, "reading users", console=Console(stderr=True), transient=True)


def _print_check(found: "Check", console: "Console") -> None:
    from rich.table import Table

    facts = Table(title=f"{found.source}: {found.task}", show_header=False)
    for name, value in _facts(found):
        facts.add_row(name, value)
    console.print(facts)

    spreads = Table("", *("min", "median", "p95", "max"))
    for name, spread in _spreads(found):
        spreads.add_row(name, *(f"{number:,}" for number in asdict(spread).values()))
    console.print(spreads)

    if found.labels:
        labels = Table("label", "history", "queries")
        for row in found.labels:
            name = row.label if row.known else f"{row.label[:40]} (no label)"
            labels.add_row(name, f"{row.history:,}", f"{row.queries:,}")
        console.print(labels)
    for kind, lines in (("warning", found.warnings), ("problem", found.problems)):
        for line in lines:
            console.print(f"{kind}: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print("a run could not start" if found.problems else "a run could start")


def _facts(found: "Check") -> Iterator[tuple[str, str]]:
    yield "users", f"{found.users:,}" + _in_brackets(found.given_roles)
    yield "roles of this config", _in_brackets(found.roles).strip(" ()") or "cannot be filled"
    yield "users with queries", f"{found.with_queries:,}"
    yield "history items", f"{found.history:,}, of them {found.plain_text:,} plain text"
    yield "queries", f"{found.queries:,}"
    yield "duplicates in a history", f"{found.duplicates:,}"
    yield "items of several users", f"{found.shared:,}"
    yield "leaks", f"{found.leaks:,} of {found.users_with_leaks:,} users ({found.leaks_are})"
    if found.dropped is not None:
        yield "dropped for want of an output", f"{found.dropped:,}"


def _in_brackets(counts: dict[str, int]) -> str:
    return (
        f" ({', '.join(f'{count:,} {name}' for name, count in counts.items())})" if counts else ""
    )


def _spreads(found: "Check") -> Iterator[tuple[str, "Spread"]]:
    yield "history items of a user", found.history_per_user
    yield "queries of a user", found.queries_per_user
    yield "words of an input", found.input_words
    yield "words of an output", found.output_words


def _print_shown(
    title: str, found: "Sequence[Shown]", items: int, limit: int, console: "Console"
) -> None:
    dropped = sum(shown.prompt is None for shown in found)
    console.rule(f"{len(found)} × {title}, {dropped} do not fit {limit} tokens")
    for shown in found[-items:]:
        console.print(f"{title} {shown.id}, {shown.tokens} tokens", style="bold", markup=False)
        if shown.prompt is None:
            console.print("does not fit lm.max-length", style="yellow")
        else:
            console.print(shown.prompt, markup=False, soft_wrap=True, end="")
        console.print(f" {shown.response}\n", style="green", markup=False, soft_wrap=True)
