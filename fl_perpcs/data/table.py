"""Users from a table with a row for each item: JSONL, JSON, Parquet, CSV, TSV or Hugging Face."""

import csv
import logging
import math
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from fl_perpcs.config import DataSection
from fl_perpcs.data.users import Example, User, hold_out
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home
from fl_perpcs.tasks import load_task

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
"""The reader in ``datasets`` of each kind of file."""

BATCH = 10_000
"""Rows that are looked at together when a table is opened."""

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\w[\w.-]*)?")
"""``owner/name:subset``, owner and subset optional."""

Time = int | float | datetime


class Row(NamedTuple):
    """A row as it stands in the table; columns that are not mapped are None."""

    user: Any
    input: Any
    output: Any
    time: Any


@dataclass(frozen=True)
class _Part:
    """One file, or a Hugging Face dataset."""

    name: str
    short: str
    data: "Dataset"
    """The mapped columns alone."""
    start: int
    """Rows of the parts before it."""

    def row_id(self, row: int) -> str:
        """Name a row in results, where nobody need know this machine's folders."""
        return f"{self.short}:{row + 1}"

    def where(self, row: int) -> str:
        """Name a row for people; rows are counted from 1, without the line of column names."""
        return f"{self.name}, row {row + 1}"


class Table:
    """A table with one row for each item of a user.

    The rows lie in Arrow files that are mapped into memory (prepared once in
    ``$PERPCS_HOME/cache/datasets``); what is held is each user's row numbers.

    Ids, inputs and outputs may be text, numbers or true/false, which become text (whole numbers
    without ``.0``), without the space around it. A row without an input is plain text; one
    without an output is dropped.

    Parameters
    ----------
    data : DataSection
        ``path`` of a file or of a folder of files, or ``dataset`` (``name`` or ``name:subset``)
        and ``split``; ``task``; the columns; and ``queries``: the last rows of each user are
        its queries. Users with no more rows than that are left out.

    Attributes
    ----------
    left_out : int
        Users with no more rows than queries.

    Raises
    ------
    PerPcsError
        If the table cannot be read, lacks a column, has no user with enough rows, or a row
        without a user, with an output that is no label of the task, or with a time that is
        neither a number nor a date; names the file, the row and the column.
    """

    def __init__(self, data: DataSection):
        self.task = load_task(data.task)
        self._data = data
        self._columns = Row(
            data.user_column, data.input_column, data.output_column, data.time_column
        )
        self._parts = list(_parts(data, self._columns))
        self._dropped: Counter[str] = Counter()
        rows = self._index()
        self._rows = {user: rows[user] for user in sorted(rows) if len(rows[user]) > data.queries}
        self.left_out = len(rows.keys() | self._dropped.keys()) - len(self._rows)
        if not self._rows:
            most = max(map(len, rows.values()), default=0)
            raise PerPcsError(
                f"{self._parts[0].name}: none of {self.left_out} users has more than data.queries ="
                f" {data.queries} rows with an output (the most are {most}); lower it"
            )

    def user_ids(self) -> list[str]:
        """Return the ids of all users with enough rows, sorted."""
        return list(self._rows)

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user, or it has too few rows.
        """
        if user_id not in self._rows:
            raise PerPcsError(
                f"no user {user_id!r} with more than {self._data.queries} rows in"
                f" {self._parts[0].name}; expected one of {len(self._rows)} ids such as"
                f" {next(iter(self._rows))!r}"
            )
        rows = list(self._read(self._rows[user_id]))
        if self._columns.time:
            # Stable: rows of one time keep their order.
            rows.sort(key=lambda found: self._time(found[0].where(found[1]), found[2]))
        items = tuple(self._example(*found) for found in rows)
        return User(user_id, *hold_out(items, self._data.queries))

    def dropped(self, user_id: str) -> int:
        """Return how many of a user's rows have no output."""
        return self._dropped[user_id]

    def _index(self) -> dict[str, array]:
        """Look at every row once and return the numbers of each user's rows with an output."""
        rows: defaultdict[str, array] = defaultdict(lambda: array("q"))
        kinds: dict[bool, str] = {}
        for part in self._parts:
            for number, row in enumerate(_walk(part, self._columns._replace(input=""))):
                where = part.where(number)
                user = self._text("user", row.user, where)
                if not user:
                    raise PerPcsError(
                        f"{where}: column {self._columns.user!r} is empty; expected a user's id"
                        " (data.user-column)"
                    )
                output = self._text("output", row.output, where)
                if not output:
                    self._dropped[user] += 1
                    continue
                self._check_label(output, where)
                if self._columns.time:
                    kinds.setdefault(isinstance(self._time(where, row), datetime), where)
                    if len(kinds) > 1:
                        raise PerPcsError(
                            f"{where}: column {self._columns.time!r} is {_shown(row.time)}, but in"
                            f" {next(iter(kinds.values()))} it is of another kind; expected numbers"
                            " or dates throughout (data.time-column)"
                        )
                rows[user].append(part.start + number)
        return rows

    def _read(self, numbers: Iterable[int]) -> Iterator[tuple[_Part, int, Row]]:
        """Read rows by their numbers in the whole table, in order."""
        for part in self._parts:
            end = part.start + len(part.data)
            mine = [number - part.start for number in numbers if part.start <= number < end]
            if mine:
                found = _records(part.data[mine], self._columns, len(mine))
                yield from zip([part] * len(mine), mine, found, strict=True)

    def _example(self, part: _Part, number: int, row: Row) -> Example:
        where = part.where(number)
        text = self._text("input", row.input, where)
        return Example(part.row_id(number), text, self._text("output", row.output, where))

    def _text(self, role: str, value: object, where: str) -> str:
        """Return a value as text; "" if there is none."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return str(int(value)) if value.is_integer() else str(value)
        if isinstance(value, str | int):
            return str(value).strip()
        raise PerPcsError(
            f"{where}: column {getattr(self._columns, role)!r} is {_shown(value)}; expected text,"
            f" a number or true/false (data.{role}-column)"
        )

    def _time(self, where: str, row: Row) -> Time:
        """Return what a row is ordered by."""
        value = row.time
        if isinstance(value, str):
            value = _parsed(value.strip())
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        raise PerPcsError(
            f"{where}: column {self._columns.time!r} is {_shown(row.time)}; expected a number or a"
            " date such as 2024-05-31 or 2024-05-31T12:00:00Z (data.time-column)"
        )

    def _check_label(self, output: str, where: str) -> None:
        labels = self.task.labels
        if labels and output not in labels:
            raise PerPcsError(
                f"{where}: column {self._columns.output!r} is {_shown(output)}, which is not a"
                f" label of task {self.task.name!r}; expected one of {', '.join(labels)}"
                " (data.output-column, data.task)"
            )


def _parts(data: DataSection, columns: Row) -> Iterator[_Part]:
    """Open the files of a path, or the Hugging Face dataset."""
    start = 0
    for name, short, loaded in _loaded_files(Path(data.path)) if data.path else _loaded_name(data):
        for role, column in columns._asdict().items():
            if column and column not in loaded.column_names:
                raise PerPcsError(
                    f"{name} has no column {column!r}; it has {', '.join(loaded.column_names)};"
                    f" set data.{role}-column to one of them"
                )
        yield _Part(name, short, loaded.select_columns(sorted(set(filter(None, columns)))), start)
        start += len(loaded)


def _loaded_files(path: Path) -> Iterator[tuple[str, str, "Dataset"]]:
    for file in _files(path):
        kind = file.suffix.lower()
        options: dict[str, Any] = {}
        if READERS[kind] == "csv":
            options = _csv_options(file, "\t" if kind == ".tsv" else ",")
        remedy = f"expected a {kind} file with one type of value in each column"
        loaded = _load(str(file), remedy, READERS[kind], data_files=[str(file)], **options)
        yield str(file), file.name, loaded


def _loaded_name(data: DataSection) -> Iterator[tuple[str, str, "Dataset"]]:
    what = f"data.dataset = {data.dataset!r}, data.split = {data.split!r}"
    name, _, subset = data.dataset.partition(":")
    # A folder of that name would be read in its place, in this process and not in the workers.
    if not NAME.fullmatch(data.dataset) or Path(name).exists():
        raise PerPcsError(
            f"{what}; expected the name of a Hugging Face dataset, such as 'owner/name' or"
            " 'owner/name:subset'; for files, set data.path to an absolute path"
        )
    remedy = "expected 'owner/name' or 'owner/name:subset' on the Hugging Face hub, and its split"
    yield what, data.dataset, _load(what, remedy, name, subset or None, split=data.split)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
        files = [file for file in files if file.is_file() and not file.name.startswith(".")]
        if not files:
            raise PerPcsError(
                f"data.path = {str(path)!r} has no table; expected files that end in"
                f" {', '.join(READERS)}"
            )
        return files
    if not path.is_file():
        raise PerPcsError(f"data.path = {str(path)!r} does not exist; expected a file or a folder")
    if path.suffix.lower() not in READERS:
        raise PerPcsError(
            f"data.path = {str(path)!r}; expected a file that ends in {', '.join(READERS)}"
        )
    return [path]


def _csv_options(file: Path, sep: str) -> dict[str, Any]:
    """Read every column as text: an id of 007 stays one, and so does a review of "null"."""
    from datasets import Features, Value

    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            columns = next(csv.reader(lines, delimiter=sep), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PerPcsError(f"{file} cannot be read: {error}; expected UTF-8 text") from None
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise PerPcsError(f"{file} has two columns {twice[0]!r}; rename one of them")
    return {
        "sep": sep,
        "encoding": "utf-8-sig",
        "features": Features({name: Value("string") for name in columns}),
        "keep_default_na": False,
        "na_values": [""],
    }


def _load(what: str, remedy: str, *args: Any, split: str = "train", **options: Any) -> "Dataset":
    """Call ``datasets.load_dataset``, one process at a time, and say what went wrong."""
    from datasets import load_dataset

    cache = home() / "cache" / "datasets"
    cache.mkdir(parents=True, exist_ok=True)
    # Worker processes open the source at the same time; the first prepares it for all.
    with FileLock(cache / "prepare.lock"), _quiet():
        try:
            loaded = load_dataset(*args, split=split, cache_dir=str(cache), **options)
        except Exception as error:  # each reader raises its own
            raise PerPcsError(f"{what} cannot be read: {_cause(error)}; {remedy}") from None
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log of ``datasets`` to itself, and its progress bars where nobody looks."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def _cause(error: BaseException) -> str:
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
        return "it has no rows"
    return " ".join(f"{error or type(error).__name__}".split())


def _walk(part: _Part, columns: Row) -> Iterator[Row]:
    """Read the columns of all rows, some rows at a time."""
    for batch in part.data.select_columns(sorted(set(filter(None, columns)))).iter(BATCH):
        yield from _records(batch, columns, len(batch[columns.user]))


def _records(batch: dict[str, list[Any]], columns: Row, count: int) -> Iterator[Row]:
    nothing = [None] * count
    return map(Row, *(batch[name] if name else nothing for name in columns))


def _parsed(text: str) -> Time | None:
    """Read a number or an ISO date."""
    for read in (int, float, datetime.fromisoformat):
        try:
            return read(text)
        except ValueError:
            continue
    return None


def _shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
