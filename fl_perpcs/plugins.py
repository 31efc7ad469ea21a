"""Finding what a config key names: something built in, installed by another package, or anywhere.

Another package registers with an entry point of the key's group::

    [project.entry-points."fl_perpcs.strategies"]
    mine = "my_package:my_strategy"
"""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fl_perpcs.errors import PerPcsError

GROUPS = {
    "strategy.name": "fl_perpcs.strategies",
    "sharers.selection": "fl_perpcs.selections",
    "assembly.scorer": "fl_perpcs.scorers",
    "assembly.merge": "fl_perpcs.merges",
}
"""The entry-point group of each key that takes plug-ins."""


def find(key: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """Return what a key's value names.

    Parameters
    ----------
    key : str
        One of :data:`GROUPS`.
    name : str
        A built-in name, an entry point's name or an import path ``package.module:name``.
    built_in : mapping of str to object
        These win over entry points of the same name.

    Raises
    ------
    PerPcsError
        If there is no such thing, or it cannot be imported.
    """
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return import_name(key, name)
    if problem := unknown(key, name, built_in):
        raise PerPcsError(problem)
    return import_name(key, _installed(GROUPS[key])[name])


def unknown(key: str, name: str, built_in: Iterable[str]) -> str:
    """Return what is wrong with a name that nothing has; "" if something has it, or may."""
    installed = _installed(GROUPS[key])
    if ":" in name or name in installed or name in built_in:
        return ""
    return (
        f"{key} = {name!r} is not known; use one of {', '.join([*built_in, *sorted(installed)])},"
        f' an entry point of the group "{GROUPS[key]}" or an import path "package.module:name"'
    )


@cache
def _installed(group: str) -> dict[str, str]:
    """Return the import path behind each name of a group, as other packages registered them."""
    return {point.name: point.value for point in entry_points(group=group)}


def import_name(key: str, path: str) -> Any:
    """Return what ``package.module:name`` names.

    Raises
    ------
    PerPcsError
        If it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PerPcsError(
            f"{key} = {path!r} cannot be imported ({error});"
            ' expected "package.module:name" of something installed, or in the folder of the run'
        ) from None
