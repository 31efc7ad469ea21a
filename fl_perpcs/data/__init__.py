"""Where users and their histories come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import Task

if TYPE_CHECKING:
    from fl_perpcs.config import Config


@dataclass(frozen=True)
class Example:
    """One input/output pair of a user: a history item, or a query with its gold output."""

    id: str
    input: str
    output: str


@dataclass(frozen=True)
class User:
    """A user: the history that personalizes, and the held-out queries that measure.

    ``group`` is what is known of the user from outside (the community of a synthetic user);
    it is there for reports, and no strategy should look at it.
    """

    id: str
    history: tuple[Example, ...]
    queries: tuple[Example, ...]
    group: str = ""


class Source(Protocol):
    """A place that users come from."""

    task: Task

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


def _personas(config: "Config") -> Source:
    from fl_perpcs.data.personas import Personas

    data = config.data
    return Personas(
        num_users=data.users,
        num_communities=data.communities,
        history=data.history,
        queries=data.queries,
        seed=config.seed,
    )


def _debian(config: "Config") -> Source:
    from fl_perpcs.data.debian import DebianSynopses

    return DebianSynopses(config.data.folder or None, queries=config.data.queries)


SOURCES: dict[str, Callable[["Config"], Source]] = {
    "personas": _personas,
    "debian-synopsis": _debian,
}


def open_source(config: "Config") -> Source:
    """Return the source that ``data.source`` names.

    Raises
    ------
    PerPcsError
        If the source is unknown, or its files are missing or malformed.
    """
    try:
        make = SOURCES[config.data.source]
    except KeyError:
        raise PerPcsError(
            f"data.source = {config.data.source!r} is not known; use one of {', '.join(SOURCES)}"
        ) from None
    return make(config)
