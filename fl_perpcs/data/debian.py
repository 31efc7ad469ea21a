"""Debian maintainers as users: the folder that ``perpcs fetch debian-synopsis`` makes."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fl_perpcs.data.leaks import find_leaks
from fl_perpcs.data.users import Example, User, hold_out
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home
from fl_perpcs.tasks import load_task

MIN_HISTORY = 10
FETCH = "Run: perpcs fetch debian-synopsis"
REMEDY = f"Move the folder away. {FETCH}"


def default_folder() -> Path:
    """Return where the descriptions are kept unless another folder is named."""
    return home() / "data" / "debian-synopsis"


class DebianSynopses:
    """Package descriptions by maintainer, read from disk one user at a time.

    Only an index is held in memory: where each user's line begins in ``users.jsonl``.

    Parameters
    ----------
    folder : str or Path, optional
        The folder with ``users.jsonl`` and ``manifest.json``;
        ``$PERPCS_HOME/data/debian-synopsis`` by default.
    queries : int
        How many items of each user, the last ones, are held out. Users whose history would
        have fewer than 10 items that give no query away are left out.

    Raises
    ------
    PerPcsError
        If the folder is missing, damaged or malformed, or ``queries`` is below 1.
    """

    task = load_task("debian-synopsis")

    def __init__(self, folder: str | Path | None, queries: int):
        if queries < 1:
            raise PerPcsError(f"data.queries = {queries}; expected at least 1")
        self.queries = queries
        folder = Path(folder).expanduser() if folder else default_folder()
        self.path = folder / "users.jsonl"
        self._offsets = _index(self.path, folder / "manifest.json", queries)

    def user_ids(self) -> list[str]:
        """Return the ids of all users with enough items, sorted."""
        return list(self._offsets)

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user, or it has too few items.
        """
        if user_id not in self._offsets:
            raise PerPcsError(
                f"no user {user_id!r} with at least {self.queries + MIN_HISTORY} items in "
                f"{self.path}; expected one of {len(self._offsets)} ids such as "
                f"{next(iter(self._offsets), 'none')!r}"
            )
        with self.path.open("rb") as file:
            file.seek(self._offsets[user_id])
            _, items = _parse(file.readline(), str(self.path))
        return User(user_id, *hold_out(items, self.queries))


def _enough(user: User) -> bool:
    """Whether enough history is left once the items that give a query away are gone."""
    return len(user.history) - len(find_leaks(user, DebianSynopses.task)) >= MIN_HISTORY


def _index(path: Path, manifest: Path, queries: int) -> dict[str, int]:
    """Read the whole file once, check it, and return where each user's line begins."""
    expected = _checksum(manifest)
    digest = hashlib.sha256()
    offsets: dict[str, int] = {}
    seen: set[str] = set()
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                user_id, items = _parse(line, f"{path}, line {number}")
                if user_id in seen:
                    raise PerPcsError(f"{path}, line {number}: second {user_id!r}. {REMEDY}")
                seen.add(user_id)
                if _enough(User(user_id, *hold_out(items, queries))):
                    offsets[user_id] = offset
                offset += len(line)
                digest.update(line)
    except FileNotFoundError:
        raise PerPcsError(f"{path} is not there. {FETCH}") from None
    if digest.hexdigest() != expected:
        raise PerPcsError(
            f"{path} has SHA-256 {digest.hexdigest()}; {manifest.name} expects {expected}: one "
            f"of them was changed. {REMEDY}"
        )
    return dict(sorted(offsets.items()))


def _checksum(manifest: Path) -> str:
    try:
        value = json.loads(manifest.read_bytes())["sha256"]
    except FileNotFoundError:
        raise PerPcsError(f"{manifest} is not there. {FETCH}") from None
    except (ValueError, KeyError, TypeError):
        raise PerPcsError(
            f"{manifest} has no field 'sha256'; expected a JSON object with one. {REMEDY}"
        ) from None
    return str(value)


def _parse(line: bytes, where: str) -> tuple[str, tuple[Example, ...]]:
    """Return the id and the items of one line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PerPcsError(f"{where}: not JSON ({error}). {REMEDY}") from None
    user_id = _field(record, "id", str, where)
    items = tuple(
        Example(*(_field(item, name, str, f"{where}, item {number}") for name in _FIELDS))
        for number, item in enumerate(_field(record, "items", list, where), start=1)
    )
    return user_id, items


_FIELDS = ("id", "input", "output")


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        found = "nothing" if value is None else type(value).__name__
        raise PerPcsError(
            f"{where}: field {name!r} is {found}; expected a {kind.__name__}. {REMEDY}"
        )
    return value
