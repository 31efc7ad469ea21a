"""Who is let into a pool: rules that look at all sharers together.

A pool refuses what does not fit it (:meth:`fl_perpcs.pool.Pool.admit`). These rules refuse what
fits and is odd all the same. They compare a sharer with the median of all, so that a minority of
bad ones does not move the bound: its distance in units of the median absolute deviation (MAD),
scaled to a normal distribution's standard deviation.

============  ===============================================================================
norms         the norm of A, B or gates is far from the others', in logarithms
duplicates    B is another's: a cosine over ``SAME``; the one who is first in order stays
popularity    gates score far higher than the others' for users at large
============  ===============================================================================

None sees whether a sharer has trained on wrong labels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fl_perpcs.assembly import gate_scores
from fl_perpcs.errors import PerPcsError
from fl_perpcs.pieces import Piece
from fl_perpcs.pool import Pool, PoolSpec

FAR = 6.0
"""Deviations from the median at which a sharer is refused."""
LEAST = 0.05
"""The least deviation that is taken for one: honest sharers may be very much alike."""
SAME = 0.9

Shares = Mapping[str, Sequence[Piece]]


def guarded(
    spec: PoolSpec,
    shares: Shares,
    bases: Mapping[str, str],
    rules: Sequence[str],
    population: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Pool, dict[str, str]]:
    """Fill a pool with the sharers whom neither the pool nor a rule refuses.

    Parameters
    ----------
    spec : PoolSpec
    shares : mapping of str to sequence of Piece
        By sharer.
    bases : mapping of str to str
        Fingerprint of the base LLM that each has trained on; the pool is for the commonest.
    rules, population
        As in :func:`refused`.

    Returns
    -------
    pool : Pool
    reasons : dict of str to str
        Why each of the others was refused.

    Raises
    ------
    PerPcsError
        If nobody is left.
    """
    pool, reasons = Pool(spec), {}
    found = sorted(bases.values())
    common = max(found, key=found.count)
    for sharer in sorted(shares, key=lambda s: bases[s] != common):
        try:
            pool.admit(sharer, shares[sharer], bases[sharer])
        except PerPcsError as error:
            reasons[sharer] = str(error)
    reasons |= refused(pool.pieces, rules, population)
    left = {sharer: pieces for sharer, pieces in pool.pieces.items() if sharer not in reasons}
    if not left:
        first = next(iter(reasons.values()))
        raise PerPcsError(
            f"admission.rules refuse all {len(shares)} sharers; the first because {first}"
        )
    return Pool(spec, pool.fingerprint, left), reasons


def refused(
    shares: Shares, rules: Sequence[str], population: Mapping[str, torch.Tensor] | None = None
) -> dict[str, str]:
    """Return who is refused, and why.

    Parameters
    ----------
    shares : mapping of str to sequence of Piece
        Pieces by sharer, each fit for the pool.
    rules : sequence of str
        Out of :data:`fl_perpcs.config.RULES`.
    population : mapping of str to Tensor, optional
        The population's query of each site, (d_in,), for ``popularity``.
    """
    reasons: dict[str, str] = {}
    if "norms" in rules:
        for part in ("A", "B", "gate"):
            norms = {sharer: _norm(pieces, part) for sharer, pieces in shares.items()}
            logs = {sharer: float(np.log(norm + 1e-12)) for sharer, norm in norms.items()}
            for sharer, distance in _distances(logs).items():
                if abs(distance) > FAR:
                    times = norms[sharer] / float(np.median([*norms.values()]))
                    reasons.setdefault(
                        sharer, f"the norm of its {part} is {times:.3g} x the median"
                    )
    if "duplicates" in rules:
        for sharer, other in _copies(shares).items():
            reasons.setdefault(sharer, f"its B is that of {other}")
    if "popularity" in rules and population is not None:
        scores = {sharer: _popularity(pieces, population) for sharer, pieces in shares.items()}
        for sharer, distance in _distances(scores).items():
            if distance > FAR:
                reasons.setdefault(
                    sharer,
                    f"its gates score {scores[sharer]:.3g} for users at large, the median"
                    f" {float(np.median([*scores.values()])):.3g}",
                )
    return reasons


def _norm(pieces: Sequence[Piece], part: str) -> float:
    """Return the root mean square over pieces of a part's norm, however many are shared."""
    squares = [float(getattr(piece, part).square().sum()) for piece in pieces]
    return float(np.sqrt(np.mean(squares)))


def _popularity(pieces: Sequence[Piece], population: Mapping[str, torch.Tensor]) -> float:
    """Return the mean published score of a sharer's pieces for the population's queries."""
    scores = [gate_scores(piece.gate[None], population[piece.site]) for piece in pieces]
    return float(torch.cat(scores).mean())


def _distances(values: Mapping[str, float]) -> dict[str, float]:
    """Return how many deviations each value is from the median."""
    found = np.array([*values.values()])
    median = np.median(found)
    deviation = max(1.4826 * float(np.median(np.abs(found - median))), LEAST)
    return dict(zip(values, ((found - median) / deviation).tolist(), strict=True))


def _copies(shares: Shares) -> dict[str, str]:
    """Return for each sharer whose B is an earlier one's who that is.

    Sharers are compared at the sites of both; rows are unit vectors, so that a piece counts as much
    as any other.
    """
    sharers = sorted(shares)
    sites = sorted({piece.site for pieces in shares.values() for piece in pieces})
    sums = np.zeros((len(sharers), len(sharers)))
    both = np.zeros_like(sums)
    for site in sites:
        found = {s: p.B for s, pieces in shares.items() for p in pieces if p.site == site}
        at = [n for n, sharer in enumerate(sharers) if sharer in found]
        rows = torch.stack([found[sharers[n]].flatten() for n in at])
        rows = torch.nn.functional.normalize(rows, dim=1)
        sums[np.ix_(at, at)] += (rows @ rows.T).numpy()
        both[np.ix_(at, at)] += 1
    alike = sums / np.maximum(both, 1) > SAME
    return {
        sharers[n]: sharers[int(first)]
        for n in range(len(sharers))
        if (first := int(np.argmax(alike[n, : n + 1]))) < n and alike[n, first]
    }
