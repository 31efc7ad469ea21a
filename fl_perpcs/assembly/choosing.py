"""Which of the scored pieces are chosen, and their weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from fl_perpcs.config import AssemblySection


class Choice(NamedTuple):
    """Pieces chosen at one site, best first: indices into its stack, and weights that sum to 1."""

    indices: Tensor
    weights: Tensor


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
