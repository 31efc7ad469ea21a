"""Queries, scores, selection and merging; what must hold whatever the numbers are."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_perpcs.assembly import (
    Choice,
    assemble,
    choose,
    cook,
    gate_scores,
    merge,
    select,
    site_query,
)
from fl_perpcs.assembly.merging import as_choice
from fl_perpcs.config import AssemblySection
from fl_perpcs.lm import LM, put_adapter, shapes_of, take_adapter
from fl_perpcs.pieces import Factors, Piece
from fl_perpcs.pool import Pool, PoolSpec, Stack
from fl_perpcs.text import IGNORE, Batch, Encoded, collate, in_batches

PAD = 0
HISTORY = [
    Encoded((50, 60, 70, 80, 90), (100, 110, 1)),
    Encoded((120, 130), (140, 1)),
    Encoded((50, 90, 90, 95), (110, 300, 400, 1)),
    Encoded((500, 501, 502), (600, 1)),
    Encoded((700,), (701, 702, 1)),
]
SELECTIONS = ("top-k", "top-p", "sample", "sample-top-p")

# Apart by more than float32 can lose, so that no order is a matter of rounding.
distinct_scores = st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True).map(
    lambda numbers: torch.tensor([n / 100 for n in numbers])
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_pool(lm: LM, sharers: int = 4, keep=lambda sharer, site: True) -> Pool:
    pool = Pool(PoolSpec(2, 4.0, shapes_of(lm)))
    for number in range(sharers):
        random = generator(number)
        pieces = []
        for site, (d_in, d_out) in shapes_of(lm).items():
            shapes = ((2, d_in), (d_out, 2), (d_in,))
            piece = Piece(site, *(torch.randn(*s, generator=random) / 3 for s in shapes))
            if keep(number, site):
                pieces.append(piece)
        if pieces:
            pool.admit(f"sharer-{number}", pieces, "base")
    return pool


def random_stack(n: int, rank: int, d_in: int, d_out: int, seed: int) -> Stack:
    random = generator(seed)
    return Stack(
        tuple(f"s{i}" for i in range(n)),
        torch.randn(n, rank, d_in, generator=random),
        torch.randn(n, d_out, rank, generator=random),
        torch.randn(n, d_in, generator=random),
    )


@settings(deadline=None)
@given(
    distinct_scores,
    st.sampled_from(SELECTIONS),
    st.integers(1, 6),
    st.floats(0.05, 20),
    st.floats(0.05, 1),
    st.floats(0.05, 20),
)
def test_weights_are_positive_sum_to_one_and_fall_with_the_score(
    scores, selection, k, temperature, top_p, sample_temperature
):
    how = AssemblySection(
        selection=selection,
        top_k=k,
        temperature=temperature,
        top_p=top_p,
        sample_temperature=sample_temperature,
    )
    choice = select(scores, how, generator())
    assert choice.weights.sum().item() == pytest.approx(1, abs=1e-5)
    assert (choice.weights >= 0).all()
    indices = choice.indices.tolist()
    assert len(set(indices)) == len(indices)
    chosen = scores[choice.indices]
    assert torch.equal(chosen, chosen.sort(descending=True).values)
    assert (choice.weights.diff() <= 0).all()
    if selection != "top-p":
        assert len(indices) == min(k, len(scores))


@settings(deadline=None)
@given(distinct_scores, st.integers(1, 6), st.floats(0.1, 10))
def test_top_k_keeps_the_k_best_with_softmax_weights(scores, k, temperature):
    choice = select(scores, AssemblySection(top_k=k, temperature=temperature))
    best = sorted(scores.tolist(), reverse=True)[:k]
    assert scores[choice.indices].tolist() == best
    exponentials = [math.exp((s - best[0]) / temperature) for s in best]
    expected = [e / sum(exponentials) for e in exponentials]
    assert choice.weights.tolist() == pytest.approx(expected, abs=1e-5)


@settings(deadline=None)
@given(distinct_scores, st.integers(1, 5), st.integers(6, 12))
def test_a_smaller_top_k_chooses_a_subset_of_a_larger(scores, few, many):
    small = select(scores, AssemblySection(top_k=few)).indices.tolist()
    large = select(scores, AssemblySection(top_k=many)).indices.tolist()
    assert large[: len(small)] == small


@settings(deadline=None)
@given(distinct_scores, st.floats(0.01, 1), st.floats(0.2, 5))
def test_top_p_keeps_the_smallest_nucleus_that_holds_p(scores, top_p, temperature):
    how = AssemblySection(selection="top-p", top_p=top_p, sample_temperature=temperature)
    kept = len(select(scores, how).indices)
    mass = torch.softmax(scores.double() / temperature, 0).sort(descending=True).values
    assert mass[:kept].sum() >= top_p - 1e-5
    assert mass[: kept - 1].sum() < top_p + 1e-5


@settings(deadline=None)
@given(distinct_scores, st.sampled_from(("top-k", "top-p")), st.randoms())
def test_selection_follows_the_pieces_when_they_change_places(scores, selection, random):
    order = list(range(len(scores)))
    random.shuffle(order)
    how = AssemblySection(selection=selection)
    first, second = select(scores, how), select(scores[order], how)
    assert first.indices.tolist() == [order[i] for i in second.indices.tolist()]
    torch.testing.assert_close(first.weights, second.weights)


def test_a_low_temperature_gives_the_best_piece_everything_and_a_high_one_all_the_same():
    scores = torch.tensor([0.1, 0.4, -0.3, 0.2])
    cold = select(scores, AssemblySection(top_k=3, temperature=1e-6))
    assert cold.indices.tolist() == [1, 3, 0]
    assert cold.weights.tolist() == [1.0, 0.0, 0.0]
    hot = select(scores, AssemblySection(top_k=3, temperature=1e6))
    assert hot.weights.tolist() == pytest.approx([1 / 3] * 3, abs=1e-5)


@pytest.mark.parametrize("selection", ["sample", "sample-top-p"])
def test_sampling_is_without_replacement_and_the_same_for_a_seed(selection):
    how = AssemblySection(selection=selection, top_k=4, top_p=1.0, sample_temperature=5.0)
    scores = torch.linspace(-1, 1, 9)
    draws = [select(scores, how, generator(seed)).indices.tolist() for seed in range(20)]
    again = [select(scores, how, generator(seed)).indices.tolist() for seed in range(20)]
    assert draws == again
    assert all(len(set(draw)) == 4 for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 5


def test_sample_draws_among_the_best_only():
    how = AssemblySection(selection="sample", top_k=2, sample_top_k=3, sample_temperature=100)
    scores = torch.tensor([5.0, 0.0, 4.0, 1.0, 3.0])
    drawn = {i for seed in range(40) for i in select(scores, how, generator(seed)).indices.tolist()}
    assert drawn == {0, 2, 4}


def test_sample_top_p_draws_among_the_nucleus_only():
    how = AssemblySection(selection="sample-top-p", top_k=1, top_p=0.8)
    scores = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = {i for seed in range(40) for i in select(scores, how, generator(seed)).indices.tolist()}
    assert drawn == {0, 1}


@pytest.mark.parametrize("selection", ["sample", "sample-top-p"])
def test_sampling_gives_k_pieces_even_when_one_piece_has_all_the_probability(selection):
    how = AssemblySection(selection=selection, top_k=3, sample_temperature=1e-4)
    choice = select(torch.tensor([3.0, 2.0, 1.0, 0.0]), how, generator())
    assert len(set(choice.indices.tolist())) == 3
    assert choice.weights.sum().item() == pytest.approx(1)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 999)
)
def test_one_piece_of_weight_one_comes_back_bit_for_bit(n, rank, d_in, d_out, seed):
    stack = random_stack(n, rank, d_in, d_out, seed)
    which = seed % n
    for how in ("factor", "delta"):
        for weights in (
            as_choice(stack, {stack.sharers[which]: 1.0}),
            Choice(torch.tensor([which]), torch.tensor([1.0])),
        ):
            merged = merge(stack, weights, how)
            assert torch.equal(merged.A, stack.A[which])
            assert torch.equal(merged.B, stack.B[which])


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(0.015625, 1, width=32), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 999),
)
def test_a_delta_merge_is_the_sum_of_updates_and_a_factor_merge_of_factors(
    weights, rank, d_in, d_out, seed
):
    stack = random_stack(len(weights) + 1, rank, d_in, d_out, seed)
    chosen = {i + 1: w for i, w in enumerate(weights)}
    choice = as_choice(stack, {stack.sharers[i]: w for i, w in chosen.items()})
    A, B = stack.A.double(), stack.B.double()
    double = replace(stack, A=A, B=B)

    delta = merge(double, choice, "delta")
    assert delta.A.shape == (len(weights) * rank, d_in)
    expected = sum(w * B[i] @ A[i] for i, w in chosen.items())
    torch.testing.assert_close(delta.B @ delta.A, expected, atol=1e-12, rtol=1e-12)

    factor = merge(double, choice, "factor")
    torch.testing.assert_close(factor.A, sum(w * A[i] for i, w in chosen.items()))
    torch.testing.assert_close(factor.B, sum(w * B[i] for i, w in chosen.items()))

    single = merge(stack, choice, "delta")
    torch.testing.assert_close((single.B @ single.A).double(), expected, atol=1e-4, rtol=1e-4)


def test_the_query_is_the_mean_over_examples_of_the_mean_of_normed_inputs():
    x = torch.randn(2, 4, 8, generator=generator())
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]]).bool()
    normed = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, unbiased=False) + 1e-5
    ).sqrt()
    expected = (normed[0, 1:].mean(0) + normed[1, 2]) / 2
    torch.testing.assert_close(site_query(x, mask), expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999))
def test_the_query_sees_no_other_positions_than_those_that_predict_a_response(seed):
    batch = collate(HISTORY, PAD)
    mask = batch.predicts_response
    x = torch.randn(*mask.shape, 8, generator=generator(seed))
    noise = torch.randn(*mask.shape, 8, generator=generator(seed + 1)) * 100
    changed = torch.where(mask.unsqueeze(-1), x, noise)
    assert torch.equal(site_query(x, mask), site_query(changed, mask))


def test_examples_without_response_tokens_do_not_count_for_the_query():
    x = torch.randn(3, 4, 8, generator=generator())
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    assert torch.equal(site_query(x, mask), site_query(x[[0, 2]], mask[[0, 2]]))


def test_scores_do_not_depend_on_a_gates_offset_or_size():
    gates, query = torch.randn(3, 16, generator=generator()), torch.randn(16)
    scaled = gates * torch.tensor([[2.0], [0.5], [30.0]]) + 3
    torch.testing.assert_close(
        gate_scores(gates, query), gate_scores(scaled, query), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("merge_by", ["factor", "delta"])
def test_a_recipe_is_sparse_and_its_weights_sum_to_one(lm, merge_by):
    stacks = random_pool(lm).stacks()
    how = AssemblySection(top_k=2, merge=merge_by)
    recipe = assemble(lm, stacks, in_batches(HISTORY, 2, PAD), how, seed=0)
    assert list(recipe) == list(lm.sites)
    for site, weights in recipe.items():
        assert sum(weights.values()) == pytest.approx(1, abs=1e-6)
        assert 2 <= len(weights) <= 4
        assert list(weights) == [s for s in stacks[site].sharers if s in weights]


def test_with_one_batch_top_k_leaves_k_pieces_of_each_site(lm):
    stacks = random_pool(lm).stacks()
    recipe = assemble(lm, stacks, [collate(HISTORY, PAD)], AssemblySection(top_k=2), seed=0)
    assert {len(weights) for weights in recipe.values()} == {2}


def test_the_recipe_does_not_depend_on_the_order_of_admission(lm):
    pool = random_pool(lm)
    other = Pool(pool.spec)
    for sharer in reversed(pool.pieces):
        other.admit(sharer, pool.pieces[sharer], "base")
    batches, how = in_batches(HISTORY, 2, PAD), AssemblySection(top_k=3)
    first = assemble(lm, pool.stacks(), batches, how, seed=0)
    assert assemble(lm, other.stacks(), batches, how, seed=0) == first


def test_the_recipe_does_not_depend_on_the_order_within_a_stack(lm):
    stacks = random_pool(lm).stacks()
    order = [2, 0, 3, 1]
    moved = {
        site: Stack(tuple(s.sharers[i] for i in order), s.A[order], s.B[order], s.gates[order])
        for site, s in stacks.items()
    }
    batches, how = in_batches(HISTORY, 2, PAD), AssemblySection(top_k=3)
    first, second = (assemble(lm, s, batches, how, seed=0) for s in (stacks, moved))
    assert first.keys() == second.keys()
    for site, weights in first.items():
        assert second[site] == pytest.approx(weights, abs=1e-5)


def test_the_recipe_does_not_depend_on_the_token_that_pads(lm):
    stacks, how = random_pool(lm).stacks(), AssemblySection(top_k=3)
    first = assemble(lm, stacks, in_batches(HISTORY, 3, PAD), how, seed=0)
    second = assemble(lm, stacks, in_batches(HISTORY, 3, 77), how, seed=0)
    assert first == second


def test_the_recipe_does_not_depend_on_what_is_in_the_slot(lm):
    stacks, how = random_pool(lm).stacks(), AssemblySection(top_k=2)
    batches = in_batches(HISTORY, 2, PAD)
    put_adapter(lm, {})
    first = assemble(lm, stacks, batches, how, seed=0)
    put_adapter(lm, cook(first, stacks, "delta"))
    assert assemble(lm, stacks, batches, how, seed=0) == first


@pytest.mark.parametrize("merge_by", ["factor", "delta"])
def test_the_cooked_recipe_is_the_mean_of_what_the_batches_put_in_place(lm, merge_by):
    stacks, how = random_pool(lm).stacks(), AssemblySection(top_k=2, merge=merge_by)
    batches = in_batches(HISTORY, 2, PAD)
    seen = []
    for batch in batches:
        choices = choose(lm, stacks, batch, how)
        in_slot = take_adapter(lm)
        for site, choice in choices.items():
            merged = merge(stacks[site], choice, merge_by)
            assert torch.equal(in_slot[site].A, merged.A)
            assert torch.equal(in_slot[site].B, merged.B)
        seen.append(in_slot)
    cooked = cook(assemble(lm, stacks, batches, how, seed=0), stacks, merge_by)
    assert list(cooked) == list(lm.sites)
    for site, (A, B) in cooked.items():
        if merge_by == "factor":
            for mean, name in ((A, "A"), (B, "B")):
                each = torch.stack([getattr(adapter[site], name) for adapter in seen])
                torch.testing.assert_close(mean, each.mean(0), atol=1e-6, rtol=1e-5)
        else:
            each = torch.stack([adapter[site].B @ adapter[site].A for adapter in seen])
            torch.testing.assert_close(B @ A, each.mean(0), atol=1e-6, rtol=1e-5)


def test_deeper_sites_see_the_pieces_that_are_in_place(lm):
    pool = random_pool(lm)
    first, *_, last = lm.sites
    loud = Pool(pool.spec)
    for sharer, pieces in pool.pieces.items():
        changed = [replace(p, B=p.B * 20) if p.site == first else p for p in pieces]
        loud.admit(sharer, changed, "base")
    batch, how = collate(HISTORY, PAD), AssemblySection(top_k=3)
    quiet_choice = choose(lm, pool.stacks(), batch, how)
    loud_choice = choose(lm, loud.stacks(), batch, how)
    torch.testing.assert_close(quiet_choice[first].weights, loud_choice[first].weights)
    assert not torch.allclose(quiet_choice[last].weights, loud_choice[last].weights)


def test_a_site_without_pieces_gets_no_update(lm):
    missing = list(lm.sites)[1]
    stacks = random_pool(lm, keep=lambda sharer, site: site != missing).stacks()
    put_adapter(lm, {missing: Factors(torch.ones(2, 32), torch.ones(32, 2))})
    how = AssemblySection(top_k=2)
    choices = choose(lm, stacks, collate(HISTORY, PAD), how)
    assert list(choices) == [site for site in lm.sites if site != missing]
    assert not take_adapter(lm)[missing].B.any()

    recipe = assemble(lm, stacks, in_batches(HISTORY, 2, PAD), how, seed=0)
    assert missing not in recipe
    put_adapter(lm, {missing: Factors(torch.ones(2, 32), torch.ones(32, 2))})
    put_adapter(lm, cook(recipe, stacks, "factor"))
    assert not take_adapter(lm)[missing].B.any()


def test_a_site_with_fewer_pieces_than_k_takes_all_of_them(lm):
    few = list(lm.sites)[2]
    stacks = random_pool(lm, keep=lambda sharer, site: site != few or sharer == 3).stacks()
    recipe = assemble(lm, stacks, in_batches(HISTORY, 2, PAD), AssemblySection(top_k=3), seed=0)
    assert recipe[few] == {"sharer-3": 1.0}


@pytest.mark.parametrize("selection", ["sample", "sample-top-p"])
def test_sampled_recipes_are_the_same_for_a_seed_and_differ_between_seeds(lm, selection):
    stacks = random_pool(lm, sharers=6).stacks()
    how = AssemblySection(selection=selection, top_k=2, sample_temperature=10.0)
    batches = in_batches(HISTORY, 2, PAD)
    assert assemble(lm, stacks, batches, how, seed=1) == assemble(lm, stacks, batches, how, seed=1)
    assert assemble(lm, stacks, batches, how, seed=1) != assemble(lm, stacks, batches, how, seed=2)


def test_no_hook_is_left_behind_when_the_forward_pass_fails(lm):
    broken = Batch(
        torch.full((1, 4), 10**6), torch.ones(1, 4, dtype=torch.long), torch.full((1, 4), IGNORE)
    )
    with pytest.raises(IndexError):
        choose(lm, random_pool(lm).stacks(), broken, AssemblySection())
    assert not any(layer._forward_pre_hooks for layer in lm.sites.values())
