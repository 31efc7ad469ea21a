"""Assembly options beyond the published ones: what each must be true of, and what it costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_assembly import HISTORY, PAD, random_pool

from fl_perpcs.assembly import (
    assemble,
    cook,
    gate_scores,
    history_queries,
    make_recipe,
    recipe_bytes,
    search_weights,
    whole,
)
from fl_perpcs.assembly.looking import learn_mixing, rerank
from fl_perpcs.assembly.scoring import centred, mean_over_sites
from fl_perpcs.config import Config, LoraHubSection, MixingSection, load_config
from fl_perpcs.lm import put_adapter, shapes_of, take_adapter
from fl_perpcs.pool import Stack
from fl_perpcs.text import in_batches
from fl_perpcs.training import mean_loss

OPTIONS = {
    "published": {},
    "centred": {"assembly.scorer": "centred", "assembly.popularity": 0.3},
    "two passes": {"assembly.passes": 2},
    "once": {"assembly.per": "history"},
    "once, two terms": {"assembly.per": "history", "assembly.passes": 2},
    "shortlist": {"assembly.shortlist": 2},
    "rerank": {"rerank.items": 4},
    "shortlist and rerank": {"assembly.shortlist": 2, "rerank.items": 4},
    "mixing": {"mixing.per": "site"},
    "mixing per target": {"mixing.per": "target", "rerank.items": 3},
    "free mixing": {"mixing.per": "site", "mixing.weights": "free", "assembly.merge": "delta"},
}


def config_of(changes: dict) -> Config:
    small = {"assembly.batch-size": 2, "mixing.steps": 3, "mixing.batch-size": 2}
    return load_config({**small, **changes})


@pytest.fixture
def stacks(lm):
    return random_pool(lm).stacks()


@pytest.fixture
def population(lm):
    random = torch.Generator().manual_seed(9)
    return {site: torch.randn(d, generator=random) for site, (d, _) in shapes_of(lm).items()}


def make(lm, stacks, population, changes):
    return make_recipe(lm, stacks, HISTORY, config_of(changes), seed=3, population=population)


def loss(lm, adapter) -> float:
    put_adapter(lm, adapter)
    return mean_loss(lm.model, in_batches(HISTORY, 8, PAD), lm.device)


@given(st.integers(1, 6), st.integers(2, 20), st.integers(0, 2**31), st.floats(0, 3))
@settings(deadline=None)
def test_fit_and_popularity_add_up_to_the_published_scores(n, d, seed, popularity):
    random = torch.Generator().manual_seed(seed)
    gates, query, mean = (torch.randn(*s, generator=random) for s in ((n, d), (d,), (d,)))
    torch.testing.assert_close(
        centred(gates, query, mean, 1.0), gate_scores(gates, query), atol=1e-4, rtol=1e-4
    )
    fit, both = centred(gates, query, mean, 0.0), centred(gates, query, mean, popularity)
    torch.testing.assert_close(
        both - fit, popularity * gate_scores(gates, mean), atol=1e-4, rtol=1e-4
    )


def test_centred_scores_do_not_see_what_everybody_asks_for():
    gates, mean = torch.randn(5, 16), torch.randn(16)
    assert centred(gates, mean, mean, 0.0).abs().max() == 0


def test_the_default_is_the_published_method(lm, stacks):
    config = config_of({})
    recipe, trained = make(lm, stacks, None, {})
    batches = in_batches(HISTORY, 2, PAD)
    assert recipe == assemble(lm, stacks, batches, config.assembly, seed=3)
    assert trained == 0


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_weights_that_a_permuted_pool_gives_too(lm, stacks, population, option):
    order = [2, 0, 3, 1]
    moved = {
        site: Stack(tuple(s.sharers[i] for i in order), s.A[order], s.B[order], s.gates[order])
        for site, s in stacks.items()
    }
    first, second = (make(lm, s, population, OPTIONS[option])[0] for s in (stacks, moved))
    assert list(first) == list(second) == list(stacks)
    for site, weights in first.items():
        assert second[site] == pytest.approx(weights, abs=1e-4)
        assert weights.keys() <= set(stacks[site].sharers)
        if option != "free mixing":
            assert sum(weights.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_leaves_the_pool_as_it_is_and_repeats(lm, stacks, population, option):
    before = {site: s.A.clone() for site, s in stacks.items()}
    first = make(lm, stacks, population, OPTIONS[option])
    assert make(lm, stacks, population, OPTIONS[option]) == first
    assert all(torch.equal(stacks[site].A, before[site]) for site in before)


# Of 5 history items; batches of 2; 4 sharers.
PASSES = {
    "published": (5, 0),
    "centred": (5, 0),
    "two passes": (10, 0),
    "once": (5, 0),
    "once, two terms": (5, 0),
    "shortlist": (10, 0),
    "rerank": (4 * 4, 0),
    "shortlist and rerank": (5 + 2 * 4, 0),
    "mixing": (5 + 3 * 2, 3 * 2),
    "mixing per target": (4 * 3 + 3 * 2, 3 * 2),
    "free mixing": (5 + 3 * 2, 3 * 2),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_pass_through_the_base_llm_is_counted(lm, stacks, population, option):
    lm.passes.forward = lm.passes.backward = 0
    make(lm, stacks, population, OPTIONS[option])
    assert (lm.passes.forward, lm.passes.backward) == PASSES[option]


def test_the_first_site_chooses_once_as_one_batch_of_the_whole_history_does(lm, stacks):
    once = make(lm, stacks, None, {"assembly.per": "history", "assembly.batch-size": 2})[0]
    one_batch = make(lm, stacks, None, {"assembly.batch-size": len(HISTORY)})[0]
    first = next(iter(stacks))
    assert once[first] == pytest.approx(one_batch[first], abs=1e-5)


def test_queries_of_a_history_do_not_depend_on_the_batches(lm):
    found = [history_queries(lm, in_batches(HISTORY, size, PAD)) for size in (1, 2, 5)]
    for site in lm.sites:
        torch.testing.assert_close(found[0][site], found[1][site], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[0][site], found[2][site], atol=1e-5, rtol=1e-5)


def test_the_shortlist_keeps_the_sharers_of_the_highest_mean_score(lm, stacks):
    queries = history_queries(lm, in_batches(HISTORY, 2, PAD))
    scores = {site: gate_scores(s.gates, queries[site]) for site, s in stacks.items()}
    fit = mean_over_sites(scores, {site: s.sharers for site, s in stacks.items()})
    best = set(sorted(fit, key=fit.get)[-2:])
    recipe, _ = make(lm, stacks, None, {"assembly.shortlist": 2, "assembly.top-k": 4})
    assert {sharer for weights in recipe.values() for sharer in weights} == best


def test_whoever_shares_few_sites_is_still_weighed_to_one(lm):
    keep = lambda sharer, site: sharer > 1 or "layers.0" in site  # noqa: E731
    stacks = random_pool(lm, keep=keep).stacks()
    recipe, _ = make(lm, stacks, None, {"rerank.items": 5})
    assert {len(weights) for weights in recipe.values()} == {2, 4}
    assert all(sum(w.values()) == pytest.approx(1, abs=1e-6) for w in recipe.values())


def test_rerank_weighs_by_the_likelihood_of_the_history(lm, stacks):
    batches = in_batches(HISTORY, 2, PAD)
    weights = rerank(lm, stacks, batches, sharpness=2.0)
    losses = {s: loss(lm, cook(whole({s: 1.0}, stacks), stacks, "factor")) for s in weights}
    expected = torch.softmax(-2.0 * torch.tensor(list(losses.values()), dtype=torch.float64), 0)
    assert list(weights.values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert max(weights, key=weights.get) == min(losses, key=losses.get)


@pytest.mark.parametrize("merge", ["factor", "delta"])
@pytest.mark.parametrize("weights", ["convex", "free"])
def test_mixing_lowers_the_loss_and_gives_the_recipe_it_was_trained_with(
    lm, stacks, merge, weights
):
    start, _ = make(lm, stacks, None, {"assembly.top-k": 4})
    settings = MixingSection(per="site", steps=30, lr=0.05, batch_size=5, weights=weights)
    lm.passes.forward = lm.passes.backward = 0
    recipe, trained = learn_mixing(lm, stacks, start, HISTORY, settings, merge, seed=0)
    assert trained == 4 * len(stacks)
    assert lm.passes.backward == 30 * 5
    assert loss(lm, cook(recipe, stacks, merge)) < loss(lm, cook(start, stacks, merge)) - 0.01


def test_mixing_per_target_moves_all_sites_alike(lm, stacks):
    start, _ = make(lm, stacks, None, {"rerank.items": 5, "rerank.sharpness": 0.5})
    settings = MixingSection(per="target", steps=5, batch_size=5)
    recipe, trained = learn_mixing(lm, stacks, start, HISTORY, settings, "factor", seed=0)
    assert trained == 4
    sites = list(recipe)
    assert recipe[sites[0]] == pytest.approx(recipe[sites[-1]], abs=1e-6)
    assert recipe[sites[0]] != pytest.approx(start[sites[0]], abs=1e-3)


def test_lorahub_finds_weights_within_its_bounds_that_beat_none(lm, stacks):
    batches = in_batches(HISTORY, 8, PAD)
    how = LoraHubSection(evaluations=60, l1=0.0)
    lm.passes.forward = 0
    weights = search_weights(lm, stacks, batches, how, "factor", seed=1)
    assert lm.passes.forward == 60 * len(HISTORY)
    assert all(-1.5 <= weight <= 1.5 for weight in weights.values())
    assert loss(lm, cook(whole(weights, stacks), stacks, "factor")) < loss(lm, {}) - 0.01
    assert search_weights(lm, stacks, batches, how, "factor", seed=1) == weights
    assert search_weights(lm, stacks, batches, how, "factor", seed=2) != weights


def test_lorahub_mixes_a_pool_of_one(lm):
    stacks = random_pool(lm, sharers=1).stacks()
    how = LoraHubSection(evaluations=9)
    weights = search_weights(lm, stacks, in_batches(HISTORY, 8, PAD), how, "factor", seed=1)
    assert list(weights) == ["sharer-0"]


def test_a_recipe_of_one_whole_adapter_is_that_adapter_bit_for_bit(lm, stacks):
    pool = random_pool(lm)
    adapter = cook(whole({"sharer-2": 1.0}, stacks), stacks, "factor")
    put_adapter(lm, adapter)
    for piece in pool.pieces["sharer-2"]:
        assert torch.equal(take_adapter(lm)[piece.site].A, piece.A)
        assert torch.equal(take_adapter(lm)[piece.site].B, piece.B)


def test_a_recipe_takes_eight_bytes_for_each_weight():
    assert recipe_bytes({"x": {"a": 0.5, "b": 0.5}, "y": {"a": 1.0}}) == 24
