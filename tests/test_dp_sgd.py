"""Private training: clipped gradients, the stated noise, and an ε that others compute too."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_assembly import HISTORY, PAD
from test_federation import federation

from fl_perpcs.config import (
    AdapterSection,
    ConfigError,
    FitSection,
    GatesSection,
    PrivacySection,
    load_config,
)
from fl_perpcs.errors import PerPcsError
from fl_perpcs.gates import train_gates
from fl_perpcs.lm import adapter_parameters, initial_adapter, put_adapter, shapes_of, take_adapter
from fl_perpcs.privacy.dp_sgd import (
    PrivacyPlan,
    _gradients_of_each,
    epsilon_of,
    fit_privately,
    plan_privacy,
    sample_rate,
)
from fl_perpcs.runs import read_lines
from fl_perpcs.text import collate
from fl_perpcs.training import fit, response_loss

ADAPTER = AdapterSection(steps=60, batch_size=8)
GATES = GatesSection(steps=50, batch_size=8)
ITEMS = len(HISTORY)
PLAIN = FitSection(steps=1, batch_size=ITEMS, lr=0.1)  # everybody is drawn
QUIET = PrivacyPlan(1e-9, 1.0, math.inf, 1e-4, ITEMS)


@pytest.fixture
def lm(make_lm):
    found = make_lm()
    put_adapter(found, initial_adapter(shapes_of(found), 2, 0))
    return found


pytestmark = pytest.mark.usefixtures("without_report")


def rdp_epsilon(noise: float, delta: float, jobs: list[tuple[float, int]]) -> float:
    """Return ε by numerical integration, without Opacus.

    The Rényi divergence of the mixture (1 - q)·N(0, σ²) + q·N(1, σ²) from N(0, σ²), and the
    conversion of Canonne, Kamath and Steinke (2020).
    """
    x = np.linspace(-40 * noise, 40 * noise + 40, 200_001)
    density = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    best = math.inf
    for order in [*np.arange(1.1, 10.9, 0.1), *range(11, 64)]:
        rdp = 0.0
        for rate, steps in jobs:
            ratio = (1 - rate) + rate * np.exp((2 * x - 1) / (2 * noise**2))
            moment = np.trapezoid(density * ratio**order, x)
            rdp += steps * math.log(moment) / (order - 1)
        convert = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, rdp + convert)
    return best


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
@pytest.mark.parametrize("items", [48, 200])
def test_the_epsilon_of_a_plan_is_what_an_independent_formula_says(epsilon, items):
    plan = plan_privacy(items, ADAPTER, GATES, PrivacySection(epsilon=epsilon))
    jobs = [(sample_rate(s, items), s.steps) for s in (ADAPTER, GATES)]
    assert plan.epsilon <= epsilon
    assert plan.epsilon == pytest.approx(rdp_epsilon(plan.noise_multiplier, 1e-4, jobs), rel=1e-3)
    assert epsilon_of(plan.noise_multiplier * 0.99, 1e-4, items, (ADAPTER, GATES)) > epsilon * 0.99


def test_adapter_and_gates_spend_together():
    plan = plan_privacy(48, ADAPTER, GATES, PrivacySection(epsilon=8.0))
    alone = epsilon_of(plan.noise_multiplier, 1e-4, 48, (ADAPTER,))
    assert alone < plan.epsilon * 0.9


def test_fewer_items_or_a_smaller_epsilon_need_more_noise():
    def noise(items: int, epsilon: float) -> float:
        privacy = PrivacySection(epsilon=epsilon)
        return plan_privacy(items, ADAPTER, GATES, privacy).noise_multiplier

    assert noise(20, 8.0) > noise(48, 8.0) > noise(200, 8.0)
    assert noise(48, 2.0) > noise(48, 8.0)


def test_a_plan_that_cannot_be_kept_is_refused():
    with pytest.raises(PerPcsError, match=r"privacy\.epsilon = 1e-05 .* needs noise over 1000"):
        plan_privacy(5, ADAPTER, GATES, PrivacySection(epsilon=1e-5))


def test_each_item_has_its_own_gradient(lm):
    parameters = adapter_parameters(lm)
    for parameter in parameters:
        parameter.requires_grad_(True)
    mean = _gradients_of_each(lm.model, parameters, HISTORY, PAD, lm.device)
    losses = []
    for number, item in enumerate(HISTORY):
        loss, tokens = response_loss(lm.model, collate([item], PAD))
        losses.append(loss.item() / tokens)
        for parameter, own in zip(
            parameters, torch.autograd.grad(loss / tokens, parameters), strict=True
        ):
            assert torch.equal(parameter.grad_sample[number], own)
    assert mean == pytest.approx(sum(losses) / len(losses))


@pytest.mark.parametrize("clip", [1e-3, 0.1])
def test_every_items_gradient_is_clipped(lm, clip, monkeypatch):
    """What an item adds to the sum is at most the clipping norm, however large its gradient."""
    from opacus.optimizers import DPOptimizer

    sums, clip_them = [], DPOptimizer.clip_and_accumulate

    def spy(self):
        clip_them(self)
        sums.append([p.summed_grad.clone() for p in self.params])

    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", spy)
    norms = []
    for item in HISTORY:
        put_adapter(lm, initial_adapter(shapes_of(lm), 2, 0))
        plan = PrivacyPlan(1e-9, clip, math.inf, 1e-4, 1)
        fit_privately(lm.model, adapter_parameters(lm), [item], PLAIN, plan, pad=PAD, seed=0)
        norms.append(float(torch.cat([g.flatten() for g in sums[-1]]).norm()))
    assert all(norm <= clip * (1 + 1e-5) for norm in norms)
    assert max(norms) > 0.9 * clip


def test_the_noise_has_the_stated_spread(lm, monkeypatch):
    """The gradient without noise is known, so what is left of it is the noise."""
    from opacus.optimizers import DPOptimizer

    found, add = [], DPOptimizer.add_noise

    def spy(self):
        before = [p.summed_grad.clone() for p in self.params]
        add(self)
        found.append(
            torch.cat([(p.grad - b).flatten() for p, b in zip(self.params, before, strict=True)])
        )

    monkeypatch.setattr(DPOptimizer, "add_noise", spy)
    plan = PrivacyPlan(1.7, 0.25, 8.0, 1e-4, ITEMS)
    settings = FitSection(steps=20, batch_size=2, lr=1e-3)
    fit_privately(lm.model, adapter_parameters(lm), HISTORY, settings, plan, pad=PAD, seed=3)
    noise = torch.cat(found)
    spread = plan.noise_multiplier * plan.clip
    count = noise.numel()
    # Five standard errors of the mean and of the standard deviation of that many numbers.
    assert abs(float(noise.mean())) < 5 * spread / count**0.5
    assert float(noise.std()) == pytest.approx(spread, rel=5 / (2 * count) ** 0.5)
    steps = torch.stack(found)
    assert len(torch.unique(steps[:, 0])) == len(found)


def test_items_are_drawn_each_for_itself(lm, monkeypatch):
    from fl_perpcs.privacy import dp_sgd

    sizes, seen = [], []

    def spy(model, parameters, batch, pad, device):
        sizes.append(len(batch))
        seen.extend(batch)
        for parameter in parameters:
            parameter.grad_sample = parameter.new_zeros((len(batch), *parameter.shape))
        return 0.0

    monkeypatch.setattr(dp_sgd, "_gradients_of_each", spy)
    settings = FitSection(steps=400, batch_size=2, lr=1e-3)
    fit_privately(lm.model, adapter_parameters(lm), HISTORY, settings, QUIET, pad=PAD, seed=1)
    rate = 2 / ITEMS
    mean = sum(sizes) / len(sizes)
    # Five standard errors of a binomial's mean, and its variance: not batches of one size.
    assert mean == pytest.approx(2, abs=5 * (ITEMS * rate * (1 - rate) / 400) ** 0.5)
    assert min(sizes) == 0 and max(sizes) >= 4
    assert all(seen.count(item) > 0 for item in HISTORY)


def test_without_noise_and_clipping_a_step_goes_where_an_ordinary_one_does(make_lm):
    # Next to nothing: Adam would blow up noise where the gradient is zero, as A's is at first.
    plan = PrivacyPlan(1e-30, 1e6, math.inf, 1e-4, 1)
    settings = FitSection(steps=3, batch_size=1, lr=0.01, clip=1e9)
    ends = []
    for fit_by in (fit, partial(fit_privately, plan=plan)):
        lm = make_lm()
        put_adapter(lm, initial_adapter(shapes_of(lm), 2, 0))
        fit_by(lm.model, adapter_parameters(lm), HISTORY[:1], settings, pad=PAD, seed=0)
        ends.append(take_adapter(lm))
    for site in ends[0]:
        for a, b in zip(ends[0][site], ends[1][site], strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def test_gates_are_trained_privately_too(lm):
    plan = PrivacyPlan(1.0, 0.1, 8.0, 1e-4, ITEMS)
    train = partial(train_gates, lm, HISTORY, FitSection(steps=3, batch_size=2), seed=0)
    first, _ = train(fit_by=partial(fit_privately, plan=plan))
    again, _ = train(fit_by=partial(fit_privately, plan=plan))
    other, _ = train(fit_by=partial(fit_privately, plan=replace(plan, noise_multiplier=2.0)))
    assert all(gate.any() for gate in first.values())
    assert all(torch.equal(first[site], again[site]) for site in first)
    assert not all(torch.equal(first[site], other[site]) for site in first)


def test_a_plan_for_other_items_is_refused(lm):
    with pytest.raises(PerPcsError, match="plan is for 3 items, but"):
        plan = replace(QUIET, items=3)
        fit_privately(lm.model, adapter_parameters(lm), HISTORY, PLAIN, plan, pad=PAD, seed=0)


def test_a_run_says_what_every_sharer_spent_and_no_loss(small_config):
    values = small_config(
        {
            "privacy.epsilon": 4.0,
            "sharers.selection": "random",
            "evaluation.references": "",
            "evaluation.resamples": 0,
        }
    )
    folder = federation(values)
    rows = [r for r in read_lines(folder / "metrics.jsonl") if r["phase"] == "share"]
    config = load_config(values)
    assert len(rows) == 3
    for row in rows:
        assert not any("loss" in key for key in row)
        assert row["epsilon"] <= 4.0
        told = epsilon_of(
            row["noise-multiplier"], row["delta"], int(row["items"]), (config.adapter, config.gates)
        )
        assert row["epsilon"] == pytest.approx(told)
        assert row["items"] == row["num-examples"]


def test_what_epsilon_does_not_cover_is_refused(small_config):
    with pytest.raises(ConfigError, match=r"does not cover the history embeddings .*most-active"):
        load_config(small_config({"privacy.epsilon": 4.0, "sharers.selection": "k-means"}))
