"""The folders of processed LaMP users that Per-Pcs and OPPU were published with, as users.

========================================  =====================================
``user_base_LLM.json``                    users with the role ``base``
``user_anchor_candidate.json``            users with the role ``candidate``
``test_100/user_test_100.json``           users with the role ``target``
``profile-id2text.json`` (may be absent)  profile texts by user id
========================================  =====================================

Each of the first three is an array of ``{"user_id", "profile": [{...}], "query": [{"id",
"input", "gold"}]}`` (Tan, Liu and Jiang, "Personalized Pieces", EMNLP 2024).
"""

from pathlib import Path
from typing import Any

from fl_perpcs.data.json_index import Index, load_index, read_records
from fl_perpcs.data.lamp import id_of, identified, typed, union
from fl_perpcs.data.lamp_text import as_text, lamp_task, read_item, read_question
from fl_perpcs.data.users import Example, User
from fl_perpcs.errors import PerPcsError

FILES = {
    "base": "user_base_LLM.json",
    "candidate": "user_anchor_candidate.json",
    "target": "test_100/user_test_100.json",
}
"""The file of each role."""

PROFILES = "profile-id2text.json"


class PerPcsFolder:
    """Users of a folder as Per-Pcs and OPPU were published with, one at a time.

    Histories keep the order of the file, which is the order of time. An item without an id is
    called after its index.

    Parameters
    ----------
    path : str or Path
        The folder.
    task : str
        A task with a ``[lamp]`` table.
    queries : int
        At most so many queries of each user, its last ones; 0: all.

    Raises
    ------
    PerPcsError
        If the task is no LaMP task, a file is missing or malformed, or a user comes twice.

    References
    ----------
    Tan, Liu and Jiang, "Personalized Pieces: Efficient Personalized Large Language Models
    through Collaborative Efforts", EMNLP 2024.
    """

    def __init__(self, path: str | Path, task: str, queries: int):
        self.task, _ = lamp_task(task)
        self.queries = queries
        if not path:
            raise PerPcsError(
                "data.path is empty; set it to the folder of the task in the data that Per-Pcs"
                f" was published with: it holds {', '.join(FILES.values())}"
            )
        self.folder = Path(path).expanduser()
        for role, name in FILES.items():
            if not (self.folder / name).is_file():
                raise PerPcsError(
                    f"{self.folder / name} is not there; expected the {role} users. Set data.path"
                    " to a task's folder in the data that Per-Pcs was published with"
                )
        self._roles: dict[str, str] = {}
        self._indexes: dict[str, Index] = {}
        for role, name in FILES.items():
            index = load_index(self.folder / name, "per-pcs", Owners)
            self._check_overlap(role, index)
            self._indexes[role] = index
            self._roles |= dict.fromkeys(index, role)

    @property
    def profiles_path(self) -> Path | None:
        """The file of profile texts by user id; None if there is none."""
        path = self.folder / PROFILES
        return path if path.is_file() else None

    def user_ids(self) -> list[str]:
        """Return the ids of all users: base users, candidates, targets, each as in their file."""
        return list(self._roles)

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user, or one of its queries or items is malformed.
        """
        return self._read(user_id)[0]

    def dropped(self, user_id: str) -> int:
        """Return how many of a user's items and queries are left out: they have no output.

        Raises
        ------
        PerPcsError
            As :meth:`user`.
        """
        return self._read(user_id)[1]

    def _read(self, user_id: str) -> tuple[User, int]:
        role = self._roles.get(user_id)
        if role is None:
            raise PerPcsError(
                f"no user {user_id!r} in {self.folder}; expected one of {len(self._roles)} ids"
                f" such as {next(iter(self._roles), 'none')!r}"
            )
        path = self.folder / FILES[role]
        (place,) = places = self._indexes[role][user_id]
        (record,) = read_records(path, places)
        where = f"{path}, record {place.number} (user {user_id!r})"
        items = union([identified(record["profile"], where, default_id=str)])
        history = [read_item(self.task, item.fields, item.id, item.where) for item in items]
        queries = [
            self._query(query, f"{where}, query {number}")
            for number, query in enumerate(record["query"], start=1)
        ]
        kept = tuple(item for item in history if item is not None)
        scored = tuple(query for query in queries if query.output)
        user = User(user_id, kept, scored[-self.queries :], role=role)
        return user, len(history) - len(kept) + len(queries) - len(scored)

    def _query(self, query: Any, where: str) -> Example:
        query_id = id_of(query, "id", where)
        where = f"{where} (id {query_id!r})"
        text = read_question(self.task, typed(query, "input", str, where), where)
        if "gold" not in query:
            raise PerPcsError(f"{where}: field 'gold' is missing; expected text. Repair the file")
        return Example(query_id, text, as_text(query["gold"], "gold", where).strip())

    def _check_overlap(self, role: str, index: Index) -> None:
        for user_id in index:
            if user_id in self._roles:
                raise PerPcsError(
                    f"user {user_id!r} is in {FILES[self._roles[user_id]]} and in {FILES[role]} of"
                    f" {self.folder}; expected disjoint roles. Remove it from one of them"
                )


class Owners:
    """Tells whose a record is; to be asked record by record."""

    def __init__(self) -> None:
        self._users: set[str] = set()

    def __call__(self, record: dict[str, Any], where: str) -> tuple[str, str]:
        """Return the user's id twice: a user has one record, and it has no other id.

        Raises
        ------
        PerPcsError
            If a field is missing or malformed, or the user comes twice.
        """
        user_id = id_of(record, "user_id", where)
        where = f"{where} (user {user_id!r})"
        if user_id in self._users:
            raise PerPcsError(f"{where}: the user comes twice; expected once. Repair the file")
        self._users.add(user_id)
        identified(typed(record, "profile", list, where), where, default_id=str)
        typed(record, "query", list, where)
        return user_id, user_id
