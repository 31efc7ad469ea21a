"""Which candidates become sharers, and which of their pieces they share."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from sklearn.cluster import KMeans

from fl_perpcs.config import SELECTIONS as NAMES
from fl_perpcs.errors import PerPcsError
from fl_perpcs.plugins import find
from fl_perpcs.seeds import derive_seed

Selection = Callable[[Mapping[str, int], Mapping[str, np.ndarray], int, int, int], Sequence[str]]
"""(activity, embeddings, count, min_history, seed) to sharers; see :func:`select_sharers`."""


def select_sharers(
    how: str,
    count: int,
    activity: Mapping[str, int],
    embeddings: Mapping[str, np.ndarray],
    *,
    min_history: int,
    seed: int,
) -> list[str]:
    """Select sharers among the candidates.

    Parameters
    ----------
    how : str
        As ``sharers.selection``: ``k-means``, ``most-active``, ``random`` or a plug-in.
    count : int
        Sharers wanted; ``k-means`` may return fewer.
    activity : mapping of str to int
        History items of each candidate.
    embeddings : mapping of str to ndarray
        Mean history embedding of each candidate, (d,); empty for ``most-active`` and ``random``.
    min_history : int
        Candidates with fewer history items are not selected.
    seed : int

    Returns
    -------
    list of str
        Sorted.

    Raises
    ------
    PerPcsError
        If no candidate has enough history, fewer than ``count`` have (other than k-means), or a
        plug-in selects nobody, somebody twice or who is no candidate.
    """
    active = sorted(user for user, items in activity.items() if items >= min_history)
    if not active or (how != "k-means" and len(active) < count):
        raise PerPcsError(
            f"{len(active)} candidates have the {min_history} history items of"
            f" sharers.min-history, but sharers.count = {count}; lower either"
        )
    select: Selection = find("sharers.selection", how, _BUILT_IN)
    chosen = list(select(activity, embeddings, count, min_history, seed))
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(activity):
        raise PerPcsError(
            f"sharers.selection = {how!r} selected {chosen}; expected different users out of the"
            f" {len(activity)} candidates"
        )
    return sorted(chosen)


def by_clusters(
    activity: Mapping[str, int],
    embeddings: Mapping[str, np.ndarray],
    count: int,
    min_history: int,
    seed: int,
) -> list[str]:
    """Return the most active candidate of each of ``count`` clusters of history embeddings.

    A cluster whose most active candidate is below ``min_history`` gives none.
    """
    users = sorted(activity)
    kmeans = KMeans(count, random_state=derive_seed(seed, "k-means") % 2**32, n_init=10)
    labels = kmeans.fit_predict(np.stack([embeddings[user] for user in users]))
    best: dict[int, str] = {}
    for user, label in zip(users, labels.tolist(), strict=True):
        if label not in best or activity[user] > activity[best[label]]:
            best[label] = user
    chosen = [user for user in best.values() if activity[user] >= min_history]
    if not chosen:
        raise PerPcsError(
            f"no cluster's most active candidate has sharers.min-history = {min_history}"
            " history items; lower it"
        )
    return chosen


def most_active(
    activity: Mapping[str, int],
    embeddings: Mapping[str, np.ndarray],
    count: int,
    min_history: int,
    seed: int,
) -> list[str]:
    """Return the candidates with the longest histories."""
    return sorted(sorted(activity), key=lambda user: -activity[user])[:count]


def at_random(
    activity: Mapping[str, int],
    embeddings: Mapping[str, np.ndarray],
    count: int,
    min_history: int,
    seed: int,
) -> list[str]:
    """Return candidates drawn out of those with enough history."""
    active = sorted(user for user, items in activity.items() if items >= min_history)
    return random.Random(derive_seed(seed, "select-sharers")).sample(active, count)


_BUILT_IN: dict[str, Selection] = dict(
    zip(NAMES, (by_clusters, most_active, at_random), strict=True)
)
WITHOUT_EMBEDDINGS = ("most-active", "random")
"""Selections that need no embeddings; for all others the candidates embed their histories."""


def shared_sites(sites: Sequence[str], ratio: float, seed: int) -> list[str]:
    """Return the sites whose pieces a sharer shares: ``ratio`` of them, at least one, in order.

    The published code draws them anew for each target and unseeded; here the sharer draws
    them once.
    """
    count = max(1, round(ratio * len(sites)))
    drawn = set(random.Random(seed).sample(range(len(sites)), count))
    return [site for i, site in enumerate(sites) if i in drawn]
