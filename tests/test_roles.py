"""Who plays which role."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.config import RolesSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.roles import Member, assign_roles, role_sizes


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
    with pytest.raises(PerPcsError, match=r"= 2 \+ 2 \+ 1 = 5 users, but there are 4"):
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


@given(st.floats(0.01, 0.97), st.floats(0.01, 0.97), st.integers(3, 500))
def test_shares_are_rounded_down_to_at_least_one_and_fit(base, candidates, users):
    base, candidates = (share / (base + candidates + 0.1) for share in (base, candidates))
    how = RolesSection(base=base, candidates=candidates, targets=1 - base - candidates)
    sizes = role_sizes(how, users)
    for size, share in zip(sizes, (how.base, how.candidates, how.targets), strict=True):
        assert size == 1 or size == pytest.approx(share * users, abs=1)
    if min(share * users for share in (how.base, how.candidates, how.targets)) >= 1:
        assert sum(sizes) <= users


def test_a_share_and_a_count_go_together():
    how = RolesSection(base=0.01, candidates=0.5, targets=7)
    assert role_sizes(how, 300) == (3, 150, 7)
    assert role_sizes(how, 20) == (1, 10, 7)


def given_members(**roles: int) -> dict[str, Member]:
    return {
        f"{role}-{i}": Member(node=1, history=3, queries=1, role=role)
        for role, count in roles.items()
        for i in range(count)
    }


def test_given_roles_are_kept_and_limited():
    members = given_members(base=5, candidate=4, target=3)
    how = RolesSection(base=2, candidates=9, targets=3, order="given")
    roles = assign_roles(members, how, seed=0)
    assert len(roles.base) == 2
    assert set(roles.base) <= {user for user in members if user.startswith("base")}
    assert roles.candidates == tuple(f"candidate-{i}" for i in range(4))
    assert roles.targets == tuple(f"target-{i}" for i in range(3))
    drawn = {assign_roles(members, how, seed).base for seed in range(20)}
    assert len(drawn) > 3


def test_given_roles_that_lack_one_or_are_strange_are_refused():
    how = RolesSection(base=1, candidates=1, targets=1, order="given")
    with pytest.raises(PerPcsError, match="of 2 users the data makes 0 a target"):
        assign_roles(given_members(base=1, candidate=1), how, seed=0)
    with pytest.raises(PerPcsError, match="the role 'server'; expected one of base, candidate"):
        assign_roles(given_members(base=1, candidate=1, target=1, server=1), how, seed=0)


@pytest.mark.parametrize("order", ["random", "activity"])
def test_users_without_history_play_no_role(order):
    members = members_of(0, 0, 1, 2, 3)
    how = RolesSection(base=1, candidates=1, targets=1, order=order)
    roles = assign_roles(members, how, seed=0)
    assert set(roles.base + roles.candidates + roles.targets) == {"user-02", "user-03", "user-04"}
    with pytest.raises(PerPcsError, match=r"there are 3 with any history \(and 2 without\)"):
        assign_roles(members, RolesSection(base=2, candidates=1, targets=1, order=order), seed=0)
