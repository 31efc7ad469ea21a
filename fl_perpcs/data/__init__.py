"""Where users and their histories come from: one interface, many sources."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fl_perpcs.data.users import Example, Source, User
from fl_perpcs.errors import PerPcsError

if TYPE_CHECKING:
    from fl_perpcs.config import Config

__all__ = ["SOURCES", "Example", "Source", "User", "open_source"]


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

    return DebianSynopses(config.data.path or None, queries=config.data.queries)


def _lamp(config: "Config") -> Source:
    from fl_perpcs.data.lamp import Lamp

    data = config.data
    return Lamp(data.path or None, data.task, split=data.split, queries=data.queries)


def _per_pcs(config: "Config") -> Source:
    from fl_perpcs.data.per_pcs_folder import PerPcsFolder

    return PerPcsFolder(config.data.path, config.data.task, queries=config.data.queries)


def _table(config: "Config") -> Source:
    from fl_perpcs.data.table import Table

    return Table(config.data)


SOURCES: dict[str, Callable[["Config"], Source]] = {
    "personas": _personas,
    "debian-synopsis": _debian,
    "lamp": _lamp,
    "per-pcs": _per_pcs,
    "table": _table,
}


def open_source(config: "Config") -> Source:
    """Return the source that ``data.source`` names, leaks treated as ``data.leaks`` says.

    Raises
    ------
    PerPcsError
        If the source is unknown, or its files are missing or malformed.
    """
    from fl_perpcs.data.leaks import LeakChecked

    try:
        make = SOURCES[config.data.source]
    except KeyError:
        raise PerPcsError(
            f"data.source = {config.data.source!r} is not known; use one of {', '.join(SOURCES)}"
        ) from None
    return LeakChecked(make(config), config.data.leaks)
