"""Random numbers that depend on who draws them and why, never on when or where."""

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return a seed of its own for each (seed, user, phase, ...).

    Parameters
    ----------
    seed : int
        The run's seed.
    *parts : str or int
        What the random numbers are for, for example the user id and the phase.

    Returns
    -------
    int
        In [0, 2**63).
    """
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def assembly_seed(seed: int, user: str) -> int:
    """Return the seed of a target's assembly, in whatever phase a part of it is done."""
    return derive_seed(seed, user, "evaluate assembled", "assembly")
