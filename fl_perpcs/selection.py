"""Which candidates become sharers, and which of their pieces they share."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.cluster import KMeans

from fl_perpcs.errors import PerPcsError
from fl_perpcs.seeds import derive_seed


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
    how : {"k-means", "most-active", "random"}
        ``k-means``: the most active candidate of each of ``count`` clusters of history
        embeddings; a cluster whose most active candidate is below ``min_history`` gives none.
    count : int
        Sharers wanted; ``k-means`` may return fewer.
    activity : mapping of str to int
        History items of each candidate.
    embeddings : mapping of str to ndarray
        Mean history embedding of each candidate, (d,); ``k-means`` only.
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
        If no candidate has enough history, or fewer than ``count`` have (other than k-means).
    """
    active = sorted(user for user, items in activity.items() if items >= min_history)
    if not active or (how != "k-means" and len(active) < count):
        raise PerPcsError(
            f"{len(active)} candidates have the {min_history} history items of"
            f" sharers.min-history, but sharers.count = {count}; lower either"
        )
    if how == "most-active":
        chosen = sorted(active, key=lambda user: -activity[user])[:count]
    elif how == "random":
        chosen = random.Random(derive_seed(seed, "select-sharers")).sample(active, count)
    else:
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
    return sorted(chosen)


def shared_sites(sites: Sequence[str], ratio: float, seed: int) -> list[str]:
    """Return the sites whose pieces a sharer shares: ``ratio`` of them, at least one, in order.

    The published code draws them anew for each target and unseeded; here the sharer draws
    them once.
    """
    count = max(1, round(ratio * len(sites)))
    drawn = set(random.Random(seed).sample(range(len(sites)), count))
    return [site for i, site in enumerate(sites) if i in drawn]
