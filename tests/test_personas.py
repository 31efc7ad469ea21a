from collections import Counter

import pytest

from fl_perpcs.data.film_words import FILM_KINDS
from fl_perpcs.data.personas import Personas, make_community
from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import load_task

TAGS = load_task("movie-tagging").labels


def personas(num_users=12, num_communities=4, history=40, queries=10, seed=3):
    return Personas(num_users, num_communities, history, queries, seed)


def all_users(source):
    return [source.user(user_id) for user_id in source.user_ids()]


def overlap(p, q):
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def test_same_seed_same_users_other_seed_other_users():
    assert all_users(personas()) == all_users(personas())
    assert personas().user("user-0000") != personas(seed=4).user("user-0000")


def test_a_user_does_not_depend_on_how_many_there_are():
    assert personas(num_users=8).user("user-0007") == personas(num_users=5000).user("user-0007")
    assert personas(num_users=12345).user_ids()[-1] == "user-12344"


def test_queries_are_held_out_and_texts_and_ids_are_unique():
    for user in all_users(personas(history=200)):
        examples = user.history + user.queries
        assert len(user.queries) == 10
        assert len({example.input for example in examples}) == len(examples)
        assert len({example.id for example in examples}) == len(examples)


def test_history_sizes_vary_around_the_mean():
    sizes = [len(user.history) for user in all_users(personas(num_users=200))]
    assert min(sizes) >= 24 and max(sizes) <= 56
    assert max(sizes) - min(sizes) > 20
    assert 37 < sum(sizes) / len(sizes) < 43


def test_users_are_dealt_over_communities():
    groups = Counter(user.group for user in all_users(personas()))
    assert groups == {f"community-{number}": 3 for number in range(4)}


def test_kinds_have_three_plausible_tags_and_all_tags_occur():
    assert {tag for kind in FILM_KINDS for tag in kind.tags} == set(TAGS)
    assert all(len(set(kind.tags)) == 3 for kind in FILM_KINDS)
    seen = {e.output for user in all_users(personas(200, 50)) for e in user.history}
    assert seen == set(TAGS)


@pytest.mark.parametrize("seed", range(5))
def test_communities_differ_in_topics_and_in_labels(seed):
    communities = [make_community(seed, number) for number in range(6)]
    agreement = []
    for number, one in enumerate(communities):
        assert sum(one.topics) == pytest.approx(1)
        for other in communities[:number]:
            assert overlap(one.topics, other.topics) < 0.75
            same = [a == b for a, b in zip(one.convention, other.convention, strict=True)]
            assert not all(same)
            agreement.append(sum(same) / len(same))
    # A kind has a usual tag, so they agree on about two thirds.
    assert 0.5 < sum(agreement) / len(agreement) < 0.8


def test_users_of_a_community_write_alike_and_not_the_same():
    source = personas(num_users=16, history=300)
    words = {
        user.id: Counter(" ".join(example.input for example in user.history).split())
        for user in all_users(source)
    }
    share = {u: {w: n / c.total() for w, n in c.items()} for u, c in words.items()}

    def alike(one, other):
        return sum(min(p, share[other].get(word, 0)) for word, p in share[one].items())

    within = alike("user-0000", "user-0004")
    across = max(alike("user-0000", f"user-{number:04d}") for number in (1, 2, 3))
    assert across < within < 0.95


@pytest.mark.parametrize("user_id", ["user-0012", "user-12", "user-00001", "user-", "bob", ""])
def test_unknown_user_is_named(user_id):
    with pytest.raises(PerPcsError, match=f"'{user_id}'"):
        personas().user(user_id)


@pytest.mark.parametrize("wrong", ["num_users", "num_communities", "history"])
def test_sizes_are_checked(wrong):
    with pytest.raises(PerPcsError, match=wrong):
        personas(**{wrong: 0})
