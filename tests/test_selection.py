"""Which candidates share, and which of their pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.errors import PerPcsError
from fl_perpcs.selection import select_sharers, shared_sites

ACTIVITY = {"a": 30, "b": 5, "c": 20, "d": 20, "e": 12, "f": 40}
# Three groups, far apart: {a, b}, {c, d}, {e, f}.
EMBEDDINGS = {
    user: np.array([10.0 * (number // 2), number % 2 * 0.1], dtype=np.float32)
    for number, user in enumerate(ACTIVITY)
}


def select(how: str, count: int = 3, min_history: int = 1, seed: int = 0, **changes) -> list[str]:
    activity = changes.get("activity", ACTIVITY)
    embeddings = changes.get("embeddings", EMBEDDINGS)
    return select_sharers(how, count, activity, embeddings, min_history=min_history, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_k_means_takes_the_most_active_of_each_cluster(seed):
    # c and d are equally active: the first id wins.
    assert select("k-means", seed=seed) == ["a", "c", "f"]


def test_a_cluster_whose_most_active_has_too_little_history_gives_none():
    assert select("k-means", min_history=21) == ["a", "f"]


def test_no_cluster_with_enough_history_is_an_error():
    with pytest.raises(PerPcsError, match="min-history"):
        select("k-means", min_history=41)


def test_k_means_does_not_depend_on_the_order_of_the_candidates():
    backwards = dict(reversed(ACTIVITY.items()))
    assert select("k-means", activity=backwards) == select("k-means")


def test_most_active_takes_the_longest_histories_and_the_first_id_of_a_tie():
    assert select("most-active") == ["a", "c", "f"]
    assert select("most-active", count=4) == ["a", "c", "d", "f"]


@pytest.mark.parametrize("how", ["most-active", "random"])
def test_fewer_candidates_with_enough_history_than_wanted_are_an_error(how):
    assert select(how, min_history=20, count=4) == ["a", "c", "d", "f"]
    with pytest.raises(PerPcsError, match=r"4 candidates.*sharers\.count = 5"):
        select(how, min_history=20, count=5)


def test_random_is_the_same_for_a_seed_and_differs_between_seeds():
    draws = [tuple(select("random", seed=seed)) for seed in range(20)]
    assert draws == [tuple(select("random", seed=seed)) for seed in range(20)]
    assert len(set(draws)) > 3
    assert all(len(set(draw)) == 3 and list(draw) == sorted(draw) for draw in draws)


def test_random_takes_none_with_too_little_history():
    assert all("b" not in select("random", min_history=6, seed=seed) for seed in range(20))


@given(st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 2**63 - 1))
def test_the_shared_sites_are_the_wanted_share_in_order_and_at_least_one(count, ratio, seed):
    sites = [f"site-{number}" for number in range(count)]
    shared = shared_sites(sites, ratio, seed)
    assert len(shared) == max(1, round(ratio * count))
    assert shared == [site for site in sites if site in set(shared)]
    assert shared == shared_sites(sites, ratio, seed)


def test_different_seeds_share_different_sites():
    sites = [f"site-{number}" for number in range(10)]
    assert len({tuple(shared_sites(sites, 0.5, seed)) for seed in range(20)}) > 10
