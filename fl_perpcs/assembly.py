"""Assembly: a target chooses pieces by gate scores and merges them into one adapter.

For each batch of history examples one forward pass is made. At each site the query of the
site scores the pieces, the best are merged and put in place at once, so that deeper sites see
them in the same pass. The weights, averaged over the batches, are the recipe: a target stores
that, not tensors.

References
----------
Tan, Liu and Jiang, "Personalized Pieces", EMNLP 2024, section 3.3.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn.functional import layer_norm

from fl_perpcs.config import AssemblySection
from fl_perpcs.lm import LM, empty_site, put_factors
from fl_perpcs.pieces import Adapter, Factors
from fl_perpcs.pool import Stack
from fl_perpcs.text import Batch

Recipe = dict[str, dict[str, float]]
"""Weights of sharers' pieces by site: ``recipe[site][sharer]``."""


class Choice(NamedTuple):
    """Pieces chosen at one site, best first: indices into its stack, and weights that sum to 1."""

    indices: Tensor
    weights: Tensor


def site_query(x: Tensor, predicts_response: Tensor) -> Tensor:
    """Return the query of a site: the mean over examples of the mean over R of LN(x_t).

    Parameters
    ----------
    x : Tensor
        The site's input, (batch, tokens, d_in).
    predicts_response : Tensor
        R, the positions whose next token is a response token, (batch, tokens), bool.

    Returns
    -------
    Tensor
        (d_in,), float32. Examples without response tokens do not count.
    """
    normed = layer_norm(x.float(), x.shape[-1:])
    mask = predicts_response.unsqueeze(-1)
    counts = mask.sum(dim=1)
    means = (normed * mask).sum(dim=1) / counts.clamp(min=1)
    return means[counts.squeeze(-1) > 0].mean(dim=0)


def gate_scores(gates: Tensor, query: Tensor) -> Tensor:
    """Return s_i = LN(g_i)·q / √d for n gates (n, d) and a query (d,), as (n,)."""
    return layer_norm(gates, gates.shape[-1:]) @ query / gates.shape[-1] ** 0.5


def select(
    scores: Tensor, how: AssemblySection, generator: torch.Generator | None = None
) -> Choice:
    """Choose pieces by their scores; the weights are softmax(chosen scores / τ).

    Parameters
    ----------
    scores : Tensor
        (n,).
    how : AssemblySection
        ``top-k``; ``top-p``: the smallest set that holds the probability mass p;
        ``sample``: k drawn without replacement out of the best; ``sample-top-p``: k drawn
        without replacement out of the ``top-p`` set (at least the k best).
    generator : torch.Generator, optional
        On the CPU, for the sampled selections.

    Returns
    -------
    Choice
        With fewer than k pieces, all of them.
    """
    k = min(how.top_k, len(scores))
    order = torch.argsort(scores, descending=True, stable=True)
    probabilities = torch.softmax(scores[order] / how.sample_temperature, dim=0)
    # A piece is in the nucleus if the better ones do not hold the mass p yet.
    nucleus = int((probabilities.cumsum(0) - probabilities < how.top_p).sum())
    if how.selection == "top-k":
        chosen = order[:k]
    elif how.selection == "top-p":
        chosen = order[:nucleus]
    else:
        among = how.sample_top_k if how.selection == "sample" else max(nucleus, k)
        drawn = torch.multinomial(
            torch.softmax(scores[order[:among]] / how.sample_temperature, dim=0).cpu(),
            k,
            generator=generator,
        )
        chosen = order[:among][drawn.sort().values.to(order.device)]
    return Choice(chosen, torch.softmax(scores[chosen] / how.temperature, dim=0))


def merge(stack: Stack, weights: Mapping[int, float] | Choice, how: str) -> Factors:
    """Merge weighted pieces of one site.

    Parameters
    ----------
    stack : Stack
    weights : Choice or mapping of int to float
        Which pieces of the stack, with which weight.
    how : {"factor", "delta"}
        ``factor``: A = Σ w_i A_i and B = Σ w_i B_i, of rank r, as published. ``delta``:
        B·A = Σ w_i B_i A_i exactly, of rank r times the number of pieces.

    Returns
    -------
    Factors
        One piece of weight 1 comes back bit for bit.
    """
    if not isinstance(weights, Choice):
        weights = Choice(
            torch.tensor(list(weights), dtype=torch.long, device=stack.A.device),
            torch.tensor(list(weights.values()), device=stack.A.device),
        )
    A, B = stack.A[weights.indices], stack.B[weights.indices]
    w = weights.weights.to(A.dtype)[:, None, None]
    if how == "factor":
        return Factors((w * A).sum(dim=0), (w * B).sum(dim=0))
    return Factors(A.flatten(0, 1), (w * B).transpose(0, 1).flatten(1))


def choose(
    lm: LM,
    stacks: Mapping[str, Stack],
    batch: Batch,
    how: AssemblySection,
    generator: torch.Generator | None = None,
) -> dict[str, Choice]:
    """Choose pieces at every site, in one forward pass over one batch of history.

    The merged pieces are left in the slot.

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
        The pool by site, on the model's device. A site without pieces gets no update.
    batch : Batch
    how : AssemblySection
    generator : torch.Generator, optional

    Returns
    -------
    dict of str to Choice
    """
    batch = batch.to(lm.device)
    predicts_response = batch.predicts_response
    choices: dict[str, Choice] = {}

    def hook_for(site: str) -> Any:
        def hook(layer: LoraLayer, args: tuple[Tensor, ...]) -> None:
            if site not in stacks:
                empty_site(layer)
                return
            query = site_query(args[0], predicts_response)
            choice = select(gate_scores(stacks[site].gates, query), how, generator)
            put_factors(layer, merge(stacks[site], choice, how.merge))
            choices[site] = choice

        return hook

    hooks = [
        layer.register_forward_pre_hook(hook_for(site))  # type: ignore[attr-defined]
        for site, layer in lm.sites.items()
    ]
    lm.model.eval()
    try:
        # Not inference_mode: what is put in the slot may be trained later.
        with torch.no_grad():
            # No logits are needed but the last: the sites are all below the head.
            lm.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                logits_to_keep=1,
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return choices


def assemble(
    lm: LM,
    stacks: Mapping[str, Stack],
    batches: Sequence[Batch],
    how: AssemblySection,
    seed: int,
) -> Recipe:
    """Return a target's recipe: the chosen weights, averaged over the batches of its history.

    The published method averages the merged A and B over the batches, which is the same:
    merging is linear in the weights.

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
        As in :func:`choose`, on any device.
    batches : sequence of Batch
    how : AssemblySection
    seed : int
        Of the sampled selections.

    Returns
    -------
    Recipe
        Weights of each site sum to 1; sharers in the order of the stack.
    """
    generator = torch.Generator().manual_seed(seed)
    stacks = on_device(stacks, lm.device)
    totals = {
        site: torch.zeros(len(stack.sharers), dtype=torch.float64) for site, stack in stacks.items()
    }
    for batch in batches:
        for site, choice in choose(lm, stacks, batch, how, generator).items():
            totals[site][choice.indices.cpu()] += choice.weights.double().cpu()
    return {
        site: {
            stacks[site].sharers[i]: float(total[i]) / len(batches)
            for i in total.nonzero().flatten().tolist()
        }
        for site, total in totals.items()
    }


def cook(recipe: Recipe, stacks: Mapping[str, Stack], how: str) -> Adapter:
    """Return the adapter of a recipe.

    Parameters
    ----------
    recipe : Recipe
    stacks : mapping of str to Stack
        The pool that the recipe was made from.
    how : {"factor", "delta"}
        As in :func:`merge`.

    Returns
    -------
    Adapter
    """
    return {
        site: merge(
            stacks[site],
            {stacks[site].sharers.index(sharer): weight for sharer, weight in weights.items()},
            how,
        )
        for site, weights in recipe.items()
    }


def on_device(stacks: Mapping[str, Stack], device: torch.device) -> dict[str, Stack]:
    """Return the pool with its tensors on a device."""
    return {
        site: Stack(s.sharers, s.A.to(device), s.B.to(device), s.gates.to(device))
        for site, s in stacks.items()
    }
