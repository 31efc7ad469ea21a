"""Leaks: history items that give a query of the same user away."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fl_perpcs.data.users import Example, Source, User
from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import Task


def plain(text: str) -> str:
    """Return a text for comparison: without case and odd spacing."""
    return " ".join(text.casefold().split())


def find_leaks(user: User, task: Task) -> list[Example]:
    """Return the history items with a query's input or, where golds are no labels, its gold.

    The first line of an input counts too: what asks more than a history item has (LaMP-1: a
    title, then references to choose from) begins with what they have in common.
    """
    inputs = {
        plain(text)
        for query in user.queries
        for text in (query.input, query.input.partition("\n")[0])
        if text
    }
    golds = set() if task.labels else {plain(query.output) for query in user.queries}
    return [
        item
        for item in user.history
        if plain(item.input or item.output) in inputs or plain(item.output) in golds
    ]


def without(history: Iterable[Example], leaks: Iterable[Example]) -> tuple[Example, ...]:
    """Return the history less the leaks."""
    gone = {id(item) for item in leaks}
    return tuple(item for item in history if id(item) not in gone)


@dataclass(frozen=True)
class LeakChecked:
    """A source whose users' leaks are removed, kept, or refused.

    Parameters
    ----------
    source : Source
    leaks : {"remove", "keep", "stop"}
    """

    source: Source
    leaks: str

    @property
    def task(self) -> Task:
        """The source's task."""
        return self.source.task

    def user_ids(self) -> list[str]:
        """Return the ids of all users."""
        return self.source.user_ids()

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user, or it has leaks and they stop the run.
        """
        user = self.source.user(user_id)
        if self.leaks == "keep":
            return user
        found = find_leaks(user, self.task)
        if found and self.leaks == "stop":
            raise PerPcsError(
                f"history item {found[0].id!r} of user {user_id!r} gives one of its queries away"
                f" ({len(found)} such item(s)); clean the data or set data.leaks = 'remove'"
            )
        return replace(user, history=without(user.history, found))
