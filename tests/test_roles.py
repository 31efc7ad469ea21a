"""Who plays which role."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.config import RolesSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.roles import Member, assign_roles


def members_of(*histories: int, nodes: int = 3) -> dict[str, Member]:
    return {
        f"user-{i:02d}": Member(node=100 + i % nodes, history=history, queries=2)
        for i, history in enumerate(histories)
    }


@given(
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["random", "activity"]),
    st.integers(0, 2**32),
)
def test_the_roles_are_disjoint_sorted_and_as_large_as_wanted(
    base, candidates, targets, order, seed
):
    members = members_of(*range(1, 17))
    how = RolesSection(base=base, candidates=candidates, targets=targets, order=order)
    roles = assign_roles(members, how, seed)
    assert [len(r) for r in (roles.base, roles.candidates, roles.targets)] == [
        base,
        candidates,
        targets,
    ]
    everyone = [*roles.base, *roles.candidates, *roles.targets]
    assert len(set(everyone)) == len(everyone)
    assert set(everyone) <= members.keys()
    for users in (roles.base, roles.candidates, roles.targets):
        assert list(users) == sorted(users)
    if order == "activity":
        assert set(roles.targets) == set(sorted(members)[-targets:])


@pytest.mark.parametrize("order", ["random", "activity"])
def test_the_roles_depend_on_the_seed_alone_not_on_nodes_or_on_who_answers_first(order):
    how = RolesSection(base=3, candidates=4, targets=2, order=order)
    here = members_of(*range(1, 13))
    there = dict(reversed(members_of(*range(1, 13), nodes=5).items()))
    assert assign_roles(here, how, seed=1) == assign_roles(there, how, seed=1)
    assert len({assign_roles(here, how, seed) for seed in range(10)}) > 5


def test_too_few_users_are_an_error_with_both_numbers():
    with pytest.raises(PerPcsError, match="= 5 users, but the federation hosts 4"):
        assign_roles(members_of(1, 2, 3, 4), RolesSection(base=2, candidates=2, targets=1), seed=0)


def test_a_target_without_queries_is_named():
    members = {"lonely": Member(node=1, history=100, queries=0), **members_of(1, 2)}
    how = RolesSection(base=0, candidates=1, targets=1, order="activity")
    with pytest.raises(PerPcsError, match="'lonely' has no queries"):
        assign_roles(members, how, seed=0)


def test_users_without_queries_may_play_the_other_roles():
    members = {"lonely": Member(node=1, history=1, queries=0), **members_of(5)}
    how = RolesSection(base=0, candidates=1, targets=1, order="activity")
    assert assign_roles(members, how, seed=0).candidates == ("lonely",)
