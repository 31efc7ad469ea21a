"""Differentially private training of a sharer's adapter and gates, with Opacus.

ε and δ hold for one history item, added or removed: each step draws every item with the same
probability (Poisson sampling), clips each item's gradient, sums them and adds Gaussian noise. Both
the adapter and the gates see the history, so one accountant counts the steps of both.

Noise is drawn from the run's seed, so that a run can be repeated. Whoever knows the seed can take
it off again: outside of simulations the seed must be the sharer's secret. How many items a sharer
has is not protected.

References
----------
Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

from fl_perpcs.config import AdapterSection, FitSection, GatesSection, PrivacySection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.seeds import derive_seed
from fl_perpcs.text import Encoded, collate
from fl_perpcs.training import only_training, optimizer_of, response_loss, seeded

LARGEST_NOISE = 1000.0
CLOSE = 1e-3
"""How near, relatively, the noise multiplier is to the smallest one that will do."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The noise that a sharer trains with, and what it buys.

    Attributes
    ----------
    noise_multiplier : float
        σ, the noise's standard deviation over the clipping norm.
    clip : float
        The largest norm of one item's gradient.
    epsilon, delta : float
        What all steps together spend, for one history item.
    items : int
        History items.
    """

    noise_multiplier: float
    clip: float
    epsilon: float
    delta: float
    items: int

    @property
    def facts(self) -> dict[str, float]:
        """What a sharer reports of it."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise-multiplier": self.noise_multiplier,
            "clip": self.clip,
            "items": self.items,
        }


def plan_privacy(
    items: int, adapter: AdapterSection, gates: GatesSection, privacy: PrivacySection
) -> PrivacyPlan:
    """Find the least noise with which adapter and gate steps together keep to ε.

    Parameters
    ----------
    items : int
        The sharer's history items.
    adapter, gates : FitSection
        Their steps and batch sizes.
    privacy : PrivacySection
        ε, δ and the clipping norm.

    Raises
    ------
    PerPcsError
        If no noise will do.
    """

    def spent(noise: float) -> float:
        return epsilon_of(noise, privacy.delta, items, (adapter, gates))

    low, high = 0.0, 1.0
    while spent(high) > privacy.epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise PerPcsError(
                f"privacy.epsilon = {privacy.epsilon:g} with privacy.delta ="
                f" {privacy.delta:g} needs noise over {LARGEST_NOISE:g} for {items} history"
                " items; raise one of them, or train fewer steps"
            )
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > privacy.epsilon else (low, middle)
    return PrivacyPlan(high, privacy.clip, spent(high), privacy.delta, items)


def epsilon_of(noise: float, delta: float, items: int, fits: Sequence[FitSection]) -> float:
    """Return the ε of several training jobs over the same items, by Rényi accounting."""
    accountant = RDPAccountant()
    accountant.history = [(noise, sample_rate(fit, items), fit.steps) for fit in fits]
    return float(accountant.get_epsilon(delta))


def sample_rate(settings: FitSection, items: int) -> float:
    """Return the probability with which a step draws an item."""
    return min(1.0, settings.batch_size * settings.accumulate / items)


def fit_privately(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    encoded: Sequence[Encoded],
    settings: FitSection,
    plan: PrivacyPlan,
    *,
    pad: int,
    seed: int,
) -> list[float]:
    """Train as :func:`fl_perpcs.training.fit` does, but privately.

    The loss of an item is its mean over response tokens. ``settings.clip`` is not used.

    Parameters
    ----------
    plan : PrivacyPlan
        For exactly these items: it counts every one of them.

    Returns
    -------
    list of float
        The mean loss of the items of each step; NaN for a step that drew none. They are not
        covered by ε: a sharer must not send them.

    Raises
    ------
    PerPcsError
        If the plan is for other items, or the loss is not finite.
    """
    if len(encoded) != plan.items:
        raise PerPcsError(
            f"the privacy plan is for {plan.items} items, but {len(encoded)} are trained on"
        )
    device = parameters[0].device
    rate = sample_rate(settings, len(encoded))
    draw = torch.Generator().manual_seed(derive_seed(seed, "items"))
    noise = torch.Generator(device=device).manual_seed(derive_seed(seed, "noise"))
    optimizer, schedule = optimizer_of(parameters, settings)
    private = DPOptimizer(
        optimizer,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.clip,
        expected_batch_size=rate * len(encoded),  # type: ignore[arg-type]  # only divides by it
        generator=noise,
    )
    losses = []
    with only_training(model, parameters), seeded(device, seed):
        for _ in range(settings.steps):
            drawn = (torch.rand(len(encoded), generator=draw) < rate).nonzero().flatten().tolist()
            batch = [encoded[i] for i in drawn]
            losses.append(_gradients_of_each(model, parameters, batch, pad, device))
            private.step()
            schedule.step()
            private.zero_grad()
    return losses


def _gradients_of_each(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    batch: Sequence[Encoded],
    pad: int,
    device: torch.device,
) -> float:
    """Put each item's own gradient into ``grad_sample``, (items, ...), and return the mean loss.

    One item at a time: exact for any module and hook, gates among them.
    """
    losses = []
    rows: list[list[torch.Tensor]] = [[] for _ in parameters]
    for item in batch:
        loss, tokens = response_loss(model, collate([item], pad).to(device))
        gradients = torch.autograd.grad(loss / tokens, parameters)
        losses.append(loss.item() / tokens)
        for row, gradient in zip(rows, gradients, strict=True):
            row.append(gradient)
    if any(loss != loss or loss == float("inf") for loss in losses):
        raise PerPcsError("the private training loss is not finite; lower the lr")
    for parameter, row in zip(parameters, rows, strict=True):
        empty = parameter.new_zeros((0, *parameter.shape))
        parameter.grad_sample = torch.stack(row) if row else empty  # type: ignore[attr-defined]
    return sum(losses) / len(losses) if losses else float("nan")
