"""Large files over HTTP: resumed where a download broke off."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import requests
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch.output import console
from fl_perpcs.runs import write_atomically

ATTEMPTS = 4
"""Requests in a row that bring nothing new before we give up."""

PAUSE = 1.0
"""Seconds after the first of these; twice as long after each further one."""

TIMEOUT = (20, 60)
"""Seconds to connect, and without any data."""

CHUNK = 1 << 20


@dataclass(frozen=True)
class Origin:
    """What a half-finished file is half of; kept next to it."""

    url: str
    etag: str
    modified: str
    size: int | None


class _BrokenOffError(Exception):
    """A download that ended early and can be resumed."""


TRANSIENT = (
    _BrokenOffError,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
)
"""What may be gone when one tries again."""


def download(url: str, part: Path) -> None:
    """Download a file to a temporary name, going on where an earlier download broke off.

    Parameters
    ----------
    url : str
    part : Path
        Where the data goes. If it is there from an earlier download of the same version of the
        file (same URL, ETag, date and size), only what is missing is asked for; if the version
        changed or the server cannot send a part, the download starts anew.

    Raises
    ------
    PerPcsError
        If the server cannot be reached, has no such file, answers with a web page or keeps
        breaking off. What was received stays for the next time.
    """
    failures = 0
    while failures < ATTEMPTS:
        before = _size(part)
        try:
            _go_on(url, part)
            return
        except TRANSIENT as error:
            problem: Exception = error
        except requests.RequestException as error:
            raise PerPcsError(f"{url} cannot be downloaded: {error}. Check --url") from None
        failures = 0 if _size(part) > before else failures + 1
        if failures < ATTEMPTS:
            time.sleep(PAUSE * 2 ** max(0, failures - 1))
    raise PerPcsError(
        f"{url} cannot be downloaded: {problem}. Check the connection and run the command again:"
        " it goes on where it broke off"
    )


def discard(part: Path) -> None:
    """Remove a half-finished file, so that the next download starts anew."""
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


def keep(part: Path, dest: Path) -> None:
    """Give a finished and checked file its final name."""
    part.replace(dest)
    _note(part).unlink(missing_ok=True)


def _go_on(url: str, part: Path) -> None:
    """Make one request for what is missing of a file."""
    origin = _origin(part, url)
    have = part.stat().st_size if origin else 0
    # Compression would make the lengths those of something else.
    headers = {"Accept-Encoding": "identity"}
    if origin and have:
        headers["Range"] = f"bytes={have}-"
        if validator := origin.etag or origin.modified:
            headers["If-Range"] = validator
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if origin and have and answer.status_code in (206, 416):
            if not _continues(answer, origin, have):
                discard(part)
                raise _BrokenOffError("the file on the server changed")
            if answer.status_code == 416:
                return
        else:
            _check(answer, url)
            origin, have = _origin_of(answer, url), 0
            write_atomically(_note(part), json.dumps(asdict(origin)))
        _receive(answer, part, have, origin.size)


def _continues(answer: requests.Response, origin: Origin, have: int) -> bool:
    """Tell whether an answer is the rest of the file that we have the start of."""
    found = re.fullmatch(
        r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", answer.headers.get("Content-Range", "")
    )
    if found is None:
        return False
    start, size = found.groups()
    if answer.status_code == 416:  # nothing is missing, or the file is shorter now
        return size == str(have) and origin.size in (None, have)
    now = _origin_of(answer, origin.url)
    return (
        start == str(have)
        and size in ("*", str(origin.size))
        # The answer to a range request need not repeat them.
        and now.etag in ("", origin.etag)
        and now.modified in ("", origin.modified)
    )


def _check(answer: requests.Response, url: str) -> None:
    """Refuse an answer that is not a file."""
    code = answer.status_code
    if code >= 500 or code == 429:
        raise _BrokenOffError(f"the server answers {code} {answer.reason}")
    if code != 200:
        raise PerPcsError(
            f"{url}: the server answers {code} {answer.reason}; expected 200 and a file. Check the"
            " address, and --url if you set it"
        )
    if answer.headers.get("Content-Type", "").lower().startswith("text/html"):
        raise PerPcsError(web_page(url))


def web_page(url: str) -> str:
    """Return what is wrong with an address that leads to a web page."""
    return (
        f"{url}: the server answers with a web page; expected a JSON file. It does so for addresses"
        " that it does not know: check --url, --split and --separation"
    )


def _receive(answer: requests.Response, part: Path, have: int, size: int | None) -> None:
    """Append what an answer holds to what we have, or begin anew if that is nothing."""
    with part.open("ab" if have else "wb") as file, _bar(part, have, size) as progress:
        for chunk in answer.iter_content(CHUNK):
            file.write(chunk)
            have += len(chunk)
            progress.update(progress.task_ids[0], completed=have)
    if size is not None and have < size:
        raise _BrokenOffError(f"the connection ended after {have} of {size} bytes")


@contextmanager
def _bar(part: Path, have: int, size: int | None) -> Iterator[Progress]:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        progress.add_task(part.name.removesuffix(".part"), total=size, completed=have)
        yield progress


def _origin_of(answer: requests.Response, url: str) -> Origin:
    length = answer.headers.get("Content-Length", "")
    etag = answer.headers.get("ETag", "")
    return Origin(
        url=url,
        # A weak one does not promise the same bytes, and If-Range may not name it.
        etag="" if etag.startswith("W/") else etag,
        modified=answer.headers.get("Last-Modified", ""),
        size=int(length) if length.isdecimal() else None,
    )


def _origin(part: Path, url: str) -> Origin | None:
    """Return the origin of a half-finished file; None if it is not known or another."""
    try:
        origin = Origin(**json.loads(_note(part).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return origin if origin.url == url and part.is_file() else None


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")
