"""Confidence intervals: a percentile bootstrap over users.

Users are the sample, not answers: those of one user resemble each other. A drawn user brings all
its answers along, and the metric is taken over the drawn answers together; as metrics are
functions of sums (:mod:`fl_perpcs.tasks.metrics`), a draw only re-weights the users' sums.

References
----------
Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13; Field and Welsh,
"Bootstrapping clustered data", JRSS B 69, 2007 (resampling whole clusters).
"""

from collections.abc import Callable

import numpy as np

LEVEL = 0.95
"""Share of the draws inside an interval."""


def draw_users(users: int, resamples: int, seed: int) -> np.ndarray:
    """Draw as many users as there are, with replacement, again and again.

    Returns
    -------
    ndarray
        (resamples, users): how often each user was drawn.
    """
    if not users:
        return np.zeros((resamples, 0), dtype=int)
    generator = np.random.default_rng(seed)
    return generator.multinomial(users, np.full(users, 1 / users), size=resamples)


def interval(
    value: Callable[[np.ndarray, np.ndarray], np.ndarray],
    sums: np.ndarray,
    counts: np.ndarray,
    draws: np.ndarray,
) -> list[float] | None:
    """Return the interval of a metric.

    Parameters
    ----------
    value : callable
        (sums, counts) to the metric, as ``Metric.value``.
    sums : ndarray
        (users, statistics).
    counts : ndarray
        (users,), of what the sums are over.
    draws : ndarray
        From :func:`draw_users`; methods compared on the same draws share their luck.

    Returns
    -------
    list of float or None
        [low, high]; None without a draw that has anything to count, or if a sum is not finite.
    """
    # einsum adds in one order on any number of threads, so a run repeats to the byte.
    drawn = np.einsum("ru,us->rs", draws.astype(float), sums)
    total = draws @ counts
    some = total > 0
    if not some.any() or not np.isfinite(sums).all():
        return None
    outside = (1 - LEVEL) / 2
    ends = np.quantile(value(drawn[some], total[some]), [outside, 1 - outside])
    return [float(end) for end in ends]
