"""A look at the history: whole adapters by its likelihood, and mixing weights learned on it.

Gates are a cheap shortlist. What a target's history says of the shortlisted sharers costs a few
forward passes, or a few steps on mixing logits: no adapter is trained, and nothing leaves the
target.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from fl_perpcs.assembly.choosing import Choice
from fl_perpcs.assembly.merging import Recipe, cook, merge, sharers_in, whole
from fl_perpcs.config import MixingSection
from fl_perpcs.lm import LM, SLOT, put_adapter
from fl_perpcs.pool import Stack
from fl_perpcs.text import Batch, Encoded
from fl_perpcs.training import fit, mean_loss


def rerank(
    lm: LM, stacks: Mapping[str, Stack], batches: Sequence[Batch], sharpness: float
) -> dict[str, float]:
    """Weigh whole adapters by how likely they make the history: softmax(-β·loss).

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
        Every sharer in it is tried, with all its pieces: one forward pass each over the batches.
    batches : sequence of Batch
    sharpness : float
        β; the loss is in nats per response token.

    Returns
    -------
    dict of str to float
        Weights of the sharers, which sum to 1.
    """
    sharers = sharers_in(stacks)
    losses = []
    for sharer in sharers:
        put_adapter(lm, cook(whole({sharer: 1.0}, stacks), stacks, "factor"))
        losses.append(mean_loss(lm.model, batches, lm.device))
    weights = torch.softmax(-sharpness * torch.tensor(losses, dtype=torch.float64), dim=0)
    return dict(zip(sharers, weights.tolist(), strict=True))


def learn_mixing(
    lm: LM,
    stacks: Mapping[str, Stack],
    recipe: Recipe,
    history: Sequence[Encoded],
    settings: MixingSection,
    merge_how: str,
    seed: int,
) -> tuple[Recipe, int]:
    """Train a recipe's weights on the history; pieces and base LLM stay frozen.

    A site's weights are softmax(log w + θ) over its pieces in the recipe, or w + θ if they are
    ``free`` (of any sign and sum), with θ = 0 at the start; with ``mixing.per = "target"`` one θ
    for each sharer serves all sites.

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
        On the model's device.
    recipe : Recipe
        Where to start from: pieces of weight 0 stay out.
    history : sequence of Encoded
    settings : MixingSection
    merge_how : str
        As ``assembly.merge``.
    seed : int

    Returns
    -------
    recipe : Recipe
    trained : int
        How many numbers were trained.
    """
    sharers = sorted({sharer for weights in recipe.values() for sharer in weights})
    shared = torch.nn.Parameter(torch.zeros(len(sharers), device=lm.device))
    mixes = {}
    for site, weights in recipe.items():
        named = [sharer for sharer, weight in weights.items() if weight > 0]
        own = torch.nn.Parameter(torch.zeros(len(named), device=lm.device))
        mixes[site] = _Mix(
            named,
            torch.tensor([stacks[site].sharers.index(s) for s in named], device=lm.device),
            torch.tensor([weights[s] for s in named], device=lm.device),
            shared if settings.per == "target" else own,
            [sharers.index(s) for s in named] if settings.per == "target" else slice(None),
            settings.weights == "free",
        )
    parameters = list({id(mix.theta): mix.theta for mix in mixes.values()}.values())
    put_adapter(lm, {})
    with _mixed(lm, stacks, mixes, merge_how):
        fit(
            lm.model,
            parameters,
            history,
            settings,
            pad=lm.pad,
            seed=seed,
        )
    learned = {
        site: dict(zip(mix.sharers, mix.weights().tolist(), strict=True))
        for site, mix in mixes.items()
    }
    return learned, sum(theta.numel() for theta in parameters)


class _Mix(NamedTuple):
    """The pieces of one site and the numbers that weigh them."""

    sharers: list[str]
    indices: Tensor
    start: Tensor
    theta: torch.nn.Parameter
    at: list[int] | slice
    free: bool

    def weights(self) -> Tensor:
        """Return the weights, (pieces,)."""
        theta = self.theta[self.at]
        return self.start + theta if self.free else torch.softmax(self.start.log() + theta, dim=0)


@contextmanager
def _mixed(
    lm: LM, stacks: Mapping[str, Stack], mixes: Mapping[str, _Mix], how: str
) -> Iterator[None]:
    """Add the mixture's update to each site's output, so that gradients reach the logits."""

    def hook_for(site: str) -> Any:
        def hook(layer: LoraLayer, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            mix = mixes[site]
            A, B = merge(stacks[site], Choice(mix.indices, mix.weights()), how)
            update = args[0].to(A.dtype) @ A.T @ B.T * layer.scaling[SLOT]
            return output + update.to(output.dtype)

        return hook

    hooks = [
        lm.sites[site].register_forward_hook(hook_for(site))  # type: ignore[attr-defined]
        for site in mixes
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
