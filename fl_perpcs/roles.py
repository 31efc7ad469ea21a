"""Who is in the federation, and who plays which role."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_perpcs.errors import PerPcsError
from fl_perpcs.seeds import derive_seed

if TYPE_CHECKING:  # the config's own checks use this module
    from fl_perpcs.config import Config, RolesSection

ROLES = ("base", "candidate", "target")
"""What a member's role may be, where the data gives roles."""


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


def role_sizes(how: "RolesSection", users: int) -> tuple[int, int, int]:
    """Return how many base users, candidates and targets are wanted.

    Parameters
    ----------
    how : RolesSection
        Counts, or shares of all users; a share is rounded down, to at least one user, so that
        shares that add up to 1 always fit.
    users : int
        All users.
    """
    base, candidates, targets = (
        # A hundredth of 300 users is 3, not the 2.9999… of floating point.
        size if isinstance(size, int) else max(1, int(size * users + 1e-9))
        for size in (how.base, how.candidates, how.targets)
    )
    return base, candidates, targets


def shortage(sizes: tuple[int, int, int], users: int, idle: int = 0) -> str:
    """Return what to say if there are not enough users for the roles; "" if there are.

    Parameters
    ----------
    sizes : tuple of int
        As :func:`role_sizes` returns them.
    users : int
        Users that can play a role.
    idle : int
        Users beyond those, without history.
    """
    if sum(sizes) <= users:
        return ""
    base, candidates, targets = sizes
    return (
        f"roles.base + roles.candidates + roles.targets = {base} + {candidates} + {targets} ="
        f" {sum(sizes)} users, but there are {users}"
        + (f" with any history (and {idle} without)" if idle else "")
        + "; lower a role or bring more users (personas: data.users)"
    )


def assign_roles(members: Mapping[str, Member], how: "RolesSection", seed: int) -> Roles:
    """Deal the users out to the roles.

    Users without history play no role: there is nothing to train on or to assemble from. Only
    the data itself can make them base users, if they have queries.

    Parameters
    ----------
    members : mapping of str to Member
    how : RolesSection
        ``random``; ``activity``: the users with the longest histories are targets (as
        published), the rest is dealt at random; or ``given``: each user as its data says. Of a
        role that more users are given than wanted, as many as wanted are drawn at random: the
        most active or the first in the file would be no fair sample.
    seed : int

    Returns
    -------
    Roles

    Raises
    ------
    PerPcsError
        If there are fewer users than the roles need, or a target has no queries.
    """
    order = sorted(members)
    random.Random(derive_seed(seed, "roles")).shuffle(order)
    sizes = role_sizes(how, len(members))
    roles = _given(order, members, sizes) if how.order == "given" else None
    if roles is None:
        able = [user for user in order if members[user].history]
        if short := shortage(sizes, len(able), len(order) - len(able)):
            raise PerPcsError(short)
        if how.order == "activity":
            able = _by_activity(able, members, sizes[2], seed)
        roles = _dealt(able, sizes)
    without = [user for user in roles.targets if not members[user].queries]
    if without:
        raise PerPcsError(f"target {without[0]!r} has no queries; expected at least one each")
    return roles


def too_few(config: "Config", roles: Roles) -> list[str]:
    """Return what the dealt roles cannot do: data that gives roles may give few of one."""
    problems = []
    if config.adaptation.mode == "federated" and len(roles.base) < 2:
        problems.append(
            f"federated adaptation needs at least 2 base users, but there are {len(roles.base)};"
            ' set roles.order = "random" or adaptation.mode = "none"'
        )
    if not config.sharers.pool and len(roles.candidates) < config.sharers.count:
        problems.append(
            f"sharers.count = {config.sharers.count}, but there are {len(roles.candidates)}"
            " candidates; lower it"
        )
    return problems


def _by_activity(
    order: list[str], members: Mapping[str, Member], targets: int, seed: int
) -> list[str]:
    """Put the most active users first and leave the rest in a random order."""
    ranked = sorted(order, key=lambda user: -members[user].history)
    rest = ranked[targets:]
    random.Random(derive_seed(seed, "roles", "rest")).shuffle(rest)
    return ranked[:targets] + rest


def _dealt(order: Sequence[str], sizes: tuple[int, int, int]) -> Roles:
    base, candidates, targets = sizes
    rest = order[targets:]
    return Roles(
        base=tuple(sorted(rest[:base])),
        candidates=tuple(sorted(rest[base : base + candidates])),
        targets=tuple(sorted(order[:targets])),
    )


def _given(
    order: Sequence[str], members: Mapping[str, Member], sizes: tuple[int, int, int]
) -> Roles:
    """Take the users of each role that the data gives, at most as many as wanted."""
    strange = [user for user in order if members[user].role not in ("", *ROLES)]
    if strange:
        raise PerPcsError(
            f"user {strange[0]!r} has the role {members[strange[0]].role!r}; expected one of"
            f" {', '.join(ROLES)} or none"
        )
    chosen = []
    for role, wanted in zip(ROLES, sizes, strict=True):
        users = [user for user in order if members[user].role == role]
        able = [user for user in users if _can_play(members[user])]
        if wanted and not able:
            raise PerPcsError(
                f'roles.order = "given", but of {len(order)} users the data makes {len(users)} a'
                f" {role}"
                + (", without any history" if users else "")
                + '; set roles.order = "random"'
                + (" or roles.base = 0" if role == "base" else "")
            )
        chosen.append(tuple(sorted(able[:wanted])))
    return Roles(*chosen)


def _can_play(member: Member) -> bool:
    """Whether a user has what its given role needs."""
    return member.history > 0 or (member.role == "base" and member.queries > 0)
