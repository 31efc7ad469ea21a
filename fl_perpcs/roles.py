"""Who is in the federation, and who plays which role."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from fl_perpcs.config import RolesSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.seeds import derive_seed


@dataclass(frozen=True)
class Member:
    """A user as the server knows it.

    Attributes
    ----------
    node : int
        The node that hosts it.
    history, queries : int
        How many items it has.
    group : str
        Known of synthetic users; for reports only.
    role : str
        What the data says it plays: ``base``, ``candidate``, ``target`` or nothing.
    """

    node: int
    history: int
    queries: int
    group: str = ""
    role: str = ""


Members = dict[str, Member]


@dataclass(frozen=True)
class Roles:
    """Disjoint sets of users, each sorted."""

    base: tuple[str, ...]
    candidates: tuple[str, ...]
    targets: tuple[str, ...]


def assign_roles(members: Mapping[str, Member], how: RolesSection, seed: int) -> Roles:
    """Deal the users out to the roles.

    Parameters
    ----------
    members : mapping of str to Member
    how : RolesSection
        ``random``, or ``activity``: the users with the longest histories are targets (as
        published), the rest is dealt at random.
    seed : int

    Returns
    -------
    Roles

    Raises
    ------
    PerPcsError
        If there are fewer users than the roles need, or a target has no queries.
    """
    needed = how.base + how.candidates + how.targets
    if needed > len(members):
        raise PerPcsError(
            f"roles.base + roles.candidates + roles.targets = {needed} users, but the federation"
            f" hosts {len(members)}; lower a role or bring more users"
        )
    order = sorted(members)
    random.Random(derive_seed(seed, "roles")).shuffle(order)
    if how.order == "activity":
        order.sort(key=lambda user: -members[user].history)
    targets = order[: how.targets]
    rest = order[how.targets :]
    if how.order == "activity":
        random.Random(derive_seed(seed, "roles", "rest")).shuffle(rest)
    without = [user for user in targets if not members[user].queries]
    if without:
        raise PerPcsError(f"target {without[0]!r} has no queries; expected at least one each")
    return Roles(
        base=tuple(sorted(rest[: how.base])),
        candidates=tuple(sorted(rest[how.base : how.base + how.candidates])),
        targets=tuple(sorted(targets)),
    )
