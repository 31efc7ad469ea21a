"""JSON arrays too large for memory: where each record is, and one record at a time.

LaMP's files are one array of records and hundreds of megabytes long. They are read once, in
chunks; what stays is an index of byte offsets by user, which is also kept on disk, so that of
several workers only the first has to read the file.
"""

import codecs
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home
from fl_perpcs.runs import write_atomically

VERSION = 1
"""Of the index on disk."""

CHUNK = 4 << 20
"""Bytes read at a time."""

LARGEST = 64 << 20
"""Bytes of the longest record that is read."""

PATIENCE = 3.0
"""Seconds before progress is shown."""

# A JSON error this close to the end of what was read may be gone when more is read: a literal,
# a number or an escaped surrogate pair is cut there.
MARGIN = 16


class Record(NamedTuple):
    """An element of the array: where it is and what it holds; numbers count from 1."""

    number: int
    offset: int
    length: int
    value: dict[str, Any]


class Place(NamedTuple):
    """Where a record is, and the id that messages name it by."""

    number: int
    id: str
    offset: int
    length: int


Index = dict[str, list[Place]]
"""Places of each user's records, in the order of the file."""

Owner = Callable[[dict[str, Any], str], tuple[str, str]]
"""``owner(record, where)`` returns the ids of a record's user and of the record."""


def records(path: Path, largest: int = LARGEST, chunk: int = CHUNK) -> Iterator[Record]:
    """Yield the records of a JSON array of objects, with bounded memory.

    Parameters
    ----------
    path : Path
    largest : int
        Bytes of the longest record that is read.
    chunk : int
        Bytes read at a time.

    Raises
    ------
    PerPcsError
        If the file cannot be read, is no JSON array of objects or has too long a record; names
        the record's number and the position in bytes.
    """
    try:
        with path.open("rb") as file:
            yield from _Scanner(path, file, largest, chunk).records()
    except FileNotFoundError:
        raise PerPcsError(f"{path} does not exist") from None
    except OSError as error:
        raise PerPcsError(f"{path} cannot be read: {error.strerror}") from None


def load_index(path: Path, kind: str, make_owner: Callable[[], Owner]) -> Index:
    """Return where each user's records are, from the cache or by reading the whole file.

    The cache is a JSON file in ``$PERPCS_HOME/cache/json-index``. It serves as long as path,
    size and modification time of the file stay what they were. A lock lets one of several
    processes read the file while the others wait.

    Parameters
    ----------
    path : Path
        A JSON array of objects.
    kind : str
        Names the rules of ``make_owner``: other rules, another index.
    make_owner : callable
        Makes the function that says whose each record is.

    Raises
    ------
    PerPcsError
        If the file is missing or malformed, or the cache cannot be written.
    """
    path = path.absolute()
    try:
        found = path.stat()
    except OSError as error:
        raise PerPcsError(f"{path} cannot be read: {error.strerror}") from None
    key = {
        "version": VERSION,
        "kind": kind,
        "path": str(path),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
    }
    name = hashlib.sha256(f"{kind}\0{path}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    cache = home() / "cache" / "json-index" / f"{name}.json"
    index = _cached(cache, key)
    if index is not None:
        return index
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{cache}.lock"):
            index = _cached(cache, key)  # by another process, while this one waited
            if index is None:
                index = _build(path, make_owner())
                write_atomically(cache, json.dumps({**key, "users": index}))
    except OSError as error:
        raise PerPcsError(
            f"the index {cache} cannot be written ({error.strerror});"
            " set PERPCS_HOME to a folder that you can write to"
        ) from None
    return index


def read_records(path: Path, places: Iterable[Place]) -> Iterator[dict[str, Any]]:
    """Yield the records at some places of a file.

    Raises
    ------
    PerPcsError
        If the file cannot be read, or a record is not there any more.
    """
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place.offset)
                yield _parsed(file.read(place.length), path, place)
    except OSError as error:
        raise PerPcsError(f"{path} cannot be read any more: {error.strerror}") from None


def _parsed(data: bytes, path: Path, place: Place) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PerPcsError(
            f"{path}: record {place.number} is not where it was; the file was changed while in"
            " use. Start again"
        )
    return value


def _build(path: Path, owner: Owner) -> Index:
    index: Index = {}
    with _progress(f"indexing {path.name}", path.stat().st_size) as show:
        for number, offset, length, value in records(path):
            user, record = owner(value, f"{path}, record {number}")
            index.setdefault(user, []).append(Place(number, record, offset, length))
            show(offset + length)
    return index


def _cached(cache: Path, key: dict[str, Any]) -> Index | None:
    """Return the index on disk; None if there is none, or it is damaged or out of date."""
    try:
        table = json.loads(cache.read_bytes())
        users = table.pop("users")
        if table != key:
            return None
        return {user: [Place(*place) for place in places] for user, places in users.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the bytes done; a bar appears if it takes long."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(text, total=total)
    begin = time.monotonic()

    def show(done: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > PATIENCE:
            bar.start()
        bar.update(task, completed=done)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


class _Scanner:
    """A window of decoded text that moves over the file, one record at a time."""

    def __init__(self, path: Path, file: BinaryIO, largest: int, chunk: int):
        self.path, self.file, self.largest, self.chunk = path, file, largest, chunk
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.parse = json.JSONDecoder().raw_decode
        self.text = ""  # the window
        self.at = 0  # where we are in it, in characters
        self.offset = 0  # the same place in the file, in bytes
        self.number = 1  # of the record that comes next
        self.ended = False

    def records(self) -> Iterator[Record]:
        if self._next() == "\ufeff":  # a byte order mark
            self._advance(self.at + 1)
        self._take("[", "the start of an array")
        if self._next() != "]":
            yield self._record()
            while self._next() == ",":
                self._take(",", "a comma")
                yield self._record()
        self._take("]", "a comma or the end of the array")
        if rest := self._next():
            raise self._error(f"found {rest!r} behind the end of the array", "nothing")

    def _record(self) -> Record:
        """Read the record that begins here."""
        if self._next() != "{":
            raise self._error(self._found(), "an object")
        while True:
            try:
                value, end = self.parse(self.text, self.at)
                break
            except json.JSONDecodeError as error:
                self._want_more(error)
            except RecursionError:
                raise self._error("it is nested too deeply", "fields of text") from None
        begin = self.offset
        self._advance(end)
        self.number += 1
        return Record(self.number - 1, begin, self.offset - begin, value)

    def _want_more(self, error: json.JSONDecodeError) -> None:
        """Read more if that may help, for a record that cannot be parsed as it is."""
        end = len(self.text.rstrip()) if self.ended else len(self.text) - MARGIN
        cut = error.msg.startswith("Unterminated") or error.pos >= end
        if not cut or self.ended:
            where = self.offset + len(self.text[self.at : error.pos].encode())
            what = "the file ends within it" if cut else f"it is not JSON ({error.msg})"
            raise self._error(what, "an object", where)
        # As much again as there is: what is read twice stays a small multiple of the record.
        held = len(self.text) - self.at
        self._fill(min(max(self.chunk, held), max(self.largest - held, 0) + self.chunk))
        if held > self.largest:
            raise self._error(
                f"it is longer than {decimal(self.largest)}, or a quotation mark is missing",
                "a shorter one",
            )

    def _next(self) -> str:
        """Skip white space and return the character that follows; "" at the end."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end] in " \t\r\n":
                end += 1
            self._advance(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            self._fill(self.chunk)

    def _take(self, character: str, what: str) -> None:
        if self._next() != character:
            raise self._error(self._found(), what)
        self._advance(self.at + 1)

    def _advance(self, end: int) -> None:
        passed = self.text[self.at : end]
        self.offset += len(passed) if passed.isascii() else len(passed.encode())
        self.at = end

    def _fill(self, size: int) -> None:
        data = self.file.read(size)
        self.ended = not data
        try:
            more = self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            where = self.file.tell() - len(error.object) + error.start
            raise self._error("it is not UTF-8", "JSON in UTF-8", where) from None
        self.text = self.text[self.at :] + more
        self.at = 0

    def _found(self) -> str:
        here = self.text[self.at : self.at + 20]
        if here.startswith("<"):
            return f"found {here!r}, a web page and not JSON"
        return f"found {here!r}" if here else "the file ends"

    def _error(self, what: str, expected: str, where: int | None = None) -> PerPcsError:
        where = self.offset if where is None else where
        return PerPcsError(
            f"{self.path}, record {self.number}, byte {where}: {what}; expected {expected}."
            " Repair the file or fetch it again"
        )
