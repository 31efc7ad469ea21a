"""Users and examples, and what a source of them must be able to do."""

from dataclasses import dataclass
from typing import Protocol

from fl_perpcs.tasks import Task


@dataclass(frozen=True)
class Example:
    """One input/output pair of a user: a history item, or a query with its gold output.

    A history item without an input (a tweet, the title of a paper) has the input ``""`` and
    trains as plain text.
    """

    id: str
    input: str
    output: str


@dataclass(frozen=True)
class User:
    """A user: the history that personalizes, and the held-out queries that measure.

    Attributes
    ----------
    id : str
    history : tuple of Example
        In the order of time where time is known.
    queries : tuple of Example
    group : str
        What is known of the user from outside (the community of a synthetic user); for
        reports, no strategy should look at it.
    role : str
        ``base``, ``candidate`` or ``target`` where the data says so, else empty.
    """

    id: str
    history: tuple[Example, ...]
    queries: tuple[Example, ...]
    group: str = ""
    role: str = ""


class Source(Protocol):
    """A place that users come from."""

    @property
    def task(self) -> Task:
        """The task that the users' examples are of."""
        ...

    def user_ids(self) -> list[str]:
        """Return the ids of all users, in a fixed order."""
        ...

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user.
        """
        ...


def hold_out(
    items: tuple[Example, ...], queries: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Split a user's items into the history and the last ones, its queries."""
    return items[: len(items) - queries], items[len(items) - queries :]
