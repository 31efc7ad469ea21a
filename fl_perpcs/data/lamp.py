"""LaMP's own files as users: questions with profiles, and their gold outputs.

A folder holds ``{split}_questions.json``, an array of ``{"id", "input", "profile": [{"id", ...,
"date"?}], "user_id"?}``, and ``{split}_outputs.json``, ``{"task", "golds": [{"id", "output"}]}``
(Salemi et al., "LaMP: When Large Language Models Meet Personalization", ACL 2024).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fl_perpcs.data.json_index import Place, load_index, read_records
from fl_perpcs.data.lamp_text import as_text, lamp_task, read_item, read_question
from fl_perpcs.data.users import Example, User
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home

KINDS: dict[type, str] = {str: "text", list: "an array"}

DATE = re.compile(r"(\d{4})(?:-(\d{1,2}))?(?:-(\d{1,2}))?(?:[T ](.*))?")


class ProfileItem(NamedTuple):
    """A profile item, the id it has in the history, and where it stands, for messages."""

    id: str
    fields: dict[str, Any]
    where: str


def default_folder(task: str, separation: str = "user") -> Path:
    """Return where ``perpcs fetch lamp`` puts a task's files.

    Parameters
    ----------
    task : str
        The task's name.
    separation : {"user", "time"}
    """
    return home() / "data" / "lamp" / (task if separation == "user" else f"{task}-time")


class Lamp:
    """Users of the LaMP benchmark, read from LaMP's own files one user at a time.

    Only an index is held in memory, and the golds. Whose a question is:

    - with ``user_id``, that user's;
    - without, all questions whose profiles have the same set of item ids are one user's, called
      ``q-`` and the id of its first question. An empty profile says nothing about its user:
      each question with one is a user of its own.

    The history is the union of the profiles of the user's questions (in time-based files
    profiles grow). An item that comes again, the same in all fields, is taken once; items that
    share an id and nothing else are all kept, as ``id``, ``id~2`` and so on. If every item has a
    date, the history is in the order of time, and otherwise in the order of the file. The
    queries are the questions in the order of the file, so a query can be among the history of an
    earlier one: ``data.leaks`` takes care of that.

    Parameters
    ----------
    path : str or Path, optional
        The folder; ``$PERPCS_HOME/data/lamp/<task>`` by default.
    task : str
        A task with a ``[lamp]`` table.
    split : str
        ``train``, ``dev`` and so on.
    queries : int
        At most so many queries of each user, its last ones; 0: all.

    Raises
    ------
    PerPcsError
        If the task is no LaMP task, a file is missing or malformed, or a question has no gold.

    References
    ----------
    Salemi, Mysore, Bendersky and Zamani, "LaMP: When Large Language Models Meet
    Personalization", ACL 2024.
    """

    def __init__(self, path: str | Path | None, task: str, split: str, queries: int):
        self.task, form = lamp_task(task)
        self.queries = queries
        folder = Path(path).expanduser() if path else default_folder(self.task.name)
        self.path = folder / f"{split}_questions.json"
        self.outputs = folder / f"{split}_outputs.json"
        if not self.path.is_file():
            get = f"Run: perpcs fetch lamp --task {self.task.name} --split {split}"
            raise PerPcsError(
                f"{self.path} is not there; expected LaMP's questions."
                f" {get if form.path else 'These files are not public: build them yourself'},"
                " or set data.path to the folder that has them"
            )
        self._golds = read_golds(self.outputs)
        self._index = load_index(self.path, "lamp", Owners)
        self._check_golds()

    def user_ids(self) -> list[str]:
        """Return the ids of all users, in the order of their first questions."""
        return list(self._index)

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user, or one of its questions or items is malformed.
        """
        return self._read(user_id)[0]

    def dropped(self, user_id: str) -> int:
        """Return how many of a user's items and questions are left out: they have no output.

        Raises
        ------
        PerPcsError
            As :meth:`user`.
        """
        return self._read(user_id)[1]

    def _read(self, user_id: str) -> tuple[User, int]:
        profiles, queries, blank = [], [], 0
        places = places_of(self._index, user_id, self.path)
        for place, record in zip(places, read_records(self.path, places), strict=True):
            where = f"{self.path}, record {place.number} (question {place.id!r})"
            profiles.append(identified(record["profile"], where))
            text = read_question(self.task, record["input"], where)
            if gold := self._golds[place.id]:
                queries.append(Example(place.id, text, gold))
            else:
                blank += 1
        items = in_time_order(union(profiles))
        history = [read_item(self.task, item.fields, item.id, item.where) for item in items]
        kept = tuple(item for item in history if item is not None)
        user = User(user_id, kept, tuple(queries[-self.queries :]))
        return user, blank + len(history) - len(kept)

    def _check_golds(self) -> None:
        for places in self._index.values():
            for place in places:
                if place.id not in self._golds:
                    raise PerPcsError(
                        f"{self.path}, record {place.number}: question {place.id!r} has no gold"
                        f" in {self.outputs}; expected one for each question. Fetch both files"
                        " again"
                    )


class Owners:
    """Tells whose a question is; to be asked question by question, in the order of the file."""

    def __init__(self) -> None:
        self._questions: set[str] = set()
        self._users: dict[tuple[str, str], str] = {}  # names by what tells users apart
        self._names: set[str] = set()

    def __call__(self, record: dict[str, Any], where: str) -> tuple[str, str]:
        """Return the ids of the user and of the question.

        Raises
        ------
        PerPcsError
            If a field is missing or malformed, or the question's id is not its own.
        """
        question = id_of(record, "id", where)
        where = f"{where} (question {question!r})"
        if question in self._questions:
            raise PerPcsError(
                f"{where}: field 'id' is that of an earlier question; expected an id of its own."
                " Repair the file"
            )
        self._questions.add(question)
        typed(record, "input", str, where)
        ids = [item.id for item in identified(typed(record, "profile", list, where), where)]
        if record.get("user_id") is not None:
            name = id_of(record, "user_id", where)
            key = ("user_id", name)
        else:
            name = f"q-{question}"
            key = ("profile", _digest(ids)) if ids else ("question", question)
        if key not in self._users:
            self._add(key, name, where)
        return self._users[key], question

    def _add(self, key: tuple[str, str], name: str, where: str) -> None:
        if name in self._names:
            raise PerPcsError(
                f"{where}: two users would be called {name!r}; expected no user_id that reads"
                " like the name of a user without one. Repair the file"
            )
        self._users[key] = name
        self._names.add(name)


def _digest(ids: Iterable[str]) -> str:
    """Tell sets of ids apart, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(set(ids))).encode()).hexdigest()


def places_of(index: Mapping[str, list[Place]], user_id: str, path: Path) -> list[Place]:
    """Return where a user's records are.

    Raises
    ------
    PerPcsError
        If there is no such user.
    """
    if user_id not in index:
        raise PerPcsError(
            f"no user {user_id!r} in {path}; expected one of {len(index)} ids such as"
            f" {next(iter(index), 'none')!r}"
        )
    return index[user_id]


def read_golds(path: Path) -> dict[str, str]:
    """Return the gold outputs of a LaMP file by question id.

    Raises
    ------
    PerPcsError
        If the file is missing or malformed, or an id comes twice.
    """
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PerPcsError(
            f"{path} is not there. LaMP publishes no outputs for its test splits, so these cannot"
            " be evaluated here: set data.split = 'dev', or fetch the files again"
        ) from None
    except OSError as error:
        raise PerPcsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PerPcsError(f"{path} is not JSON ({error}). Fetch it again") from None
    golds: dict[str, str] = {}
    for number, gold in enumerate(typed(table, "golds", list, str(path)), start=1):
        where = f"{path}, gold {number}"
        question = id_of(gold, "id", where)
        where = f"{where} (question {question!r})"
        if question in golds:
            raise PerPcsError(f"{where}: a second gold for the question; expected one")
        if "output" not in gold:
            raise PerPcsError(f"{where}: field 'output' is missing. Fetch the file again")
        golds[question] = as_text(gold["output"], "output", where).strip()
    return golds


def typed(record: Any, name: str, kind: type, where: str) -> Any:
    """Return a field that must be there and of this kind.

    Raises
    ------
    PerPcsError
        If it is not.
    """
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise PerPcsError(
            f"{where}: field {name!r} is {found}; expected {KINDS[kind]}."
            " Repair the file or fetch it again"
        )
    return value


def id_of(record: Any, name: str, where: str) -> str:
    """Return an id, which may be a number, as text.

    Raises
    ------
    PerPcsError
        If it is missing or blank, or neither text nor a whole number.
    """
    value = record.get(name) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        found = "missing" if value is None else repr(value)
        raise PerPcsError(
            f"{where}: field {name!r} is {found}; expected text or a whole number."
            " Repair the file or fetch it again"
        )
    return str(value).strip()


def identified(
    profile: Iterable[Any], where: str, default_id: Callable[[int], str] | None = None
) -> list[ProfileItem]:
    """Return the items of a profile with their ids.

    Parameters
    ----------
    profile : iterable
    where : str
        File and record, for messages.
    default_id : callable, optional
        Makes the id of an item without one from its index; by default each must have one.

    Raises
    ------
    PerPcsError
        If an item is no object or has no id.
    """
    items = []
    for index, fields in enumerate(profile):
        if default_id and isinstance(fields, dict) and fields.get("id") is None:
            item_id = default_id(index)
        else:
            item_id = id_of(fields, "id", f"{where}, profile item {index + 1}")
        items.append(ProfileItem(item_id, fields, f"{where}, profile item {item_id!r}"))
    return items


def union(profiles: Iterable[Iterable[ProfileItem]]) -> list[ProfileItem]:
    """Return each item once; items that share an id but not the content get ids of their own."""
    found: dict[str, list[ProfileItem]] = {}
    for item in (item for profile in profiles for item in profile):
        same = found.setdefault(item.id, [])
        if all(item.fields != other.fields for other in same):
            same.append(item)
    return list(_renamed(found.values()))


def _renamed(groups: Iterable[list[ProfileItem]]) -> Iterator[ProfileItem]:
    for same in groups:
        yield same[0]
        for number, item in enumerate(same[1:], start=2):
            yield item._replace(id=f"{item.id}~{number}")


def in_time_order(items: list[ProfileItem]) -> list[ProfileItem]:
    """Sort items by date if all have one; those of one date keep their order.

    Raises
    ------
    PerPcsError
        If a date is neither a year nor like 2016-05-01.
    """
    if any(item.fields.get("date") is None for item in items):
        return items
    return sorted(items, key=_date)


def _date(item: ProfileItem) -> tuple[int, int, int, str]:
    value = item.fields["date"]
    found = DATE.fullmatch(str(value).strip())
    if found is None:
        raise PerPcsError(
            f"{item.where}: field 'date' is {value!r}; expected a year or a date such as"
            " '2016-05-01'. Repair the file"
        )
    year, month, day, time = found.groups()
    return int(year), int(month or 0), int(day or 0), time or ""
