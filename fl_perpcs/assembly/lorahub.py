"""Gradient-free weights of whole adapters.

References
----------
Huang et al., "LoraHub: Efficient Cross-Task Generalization via Dynamic LoRA Composition",
COLM 2024; Hansen and Ostermeier, "Completely Derandomized Self-Adaptation in Evolution
Strategies", 2001 (CMA-ES).
"""

from collections.abc import Mapping, Sequence

import cma
import numpy as np

from fl_perpcs.assembly.merging import cook, sharers_in, whole
from fl_perpcs.config import LoraHubSection
from fl_perpcs.lm import LM, put_adapter
from fl_perpcs.pool import Stack
from fl_perpcs.text import Batch
from fl_perpcs.training import mean_loss

BOUND = 1.5
"""Largest weight of an adapter, either way, as published."""
SPREAD = 0.5
"""Standard deviation of the first candidates, a third of the way to the bound."""


def search_weights(
    lm: LM,
    stacks: Mapping[str, Stack],
    batches: Sequence[Batch],
    how: LoraHubSection,
    merge_how: str,
    seed: int,
) -> dict[str, float]:
    """Search for the weights of whole adapters under which the history is likeliest.

    Minimized is the loss plus ``lorahub.l1`` times the mean absolute weight, with CMA-ES from
    all weights 0. Published is the merge ``factor``.

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
    batches : sequence of Batch
        Of the few history items that are looked at; one forward pass for each evaluation.
    how : LoraHubSection
    merge_how : str
        As ``assembly.merge``.
    seed : int

    Returns
    -------
    dict of str to float
        In [-1.5, 1.5]; they need not sum to 1.
    """
    sharers = sharers_in(stacks)

    def cost(weights: np.ndarray) -> float:
        recipe = whole(dict(zip(sharers, map(float, weights), strict=True)), stacks)
        put_adapter(lm, cook(recipe, stacks, merge_how))
        loss = mean_loss(lm.model, batches, lm.device)
        return loss + how.l1 * float(np.abs(weights).mean())

    # CMA-ES needs two dimensions; a second one that nothing depends on does no harm.
    start = np.zeros(max(2, len(sharers)))
    search = cma.CMAEvolutionStrategy(
        start,
        SPREAD,
        {
            "bounds": [-BOUND, BOUND],
            "maxfevals": how.evaluations,
            "seed": seed % (2**32 - 1) + 1,
            "verbose": -9,
        },
    )
    best, best_cost, left = start, cost(start[: len(sharers)]), how.evaluations - 1
    while left > 0 and not search.stop():
        tried = search.ask()[:left]
        costs = [cost(weights[: len(sharers)]) for weights in tried]
        left -= len(tried)
        if min(costs) < best_cost:
            best, best_cost = tried[int(np.argmin(costs))], min(costs)
        if len(tried) < search.popsize:
            break
        search.tell(tried, costs)
    return dict(zip(sharers, map(float, best[: len(sharers)]), strict=True))
