"""Forward passes over a target's history, in which gates score the pieces.

For each batch of history examples one pass is made. At each site the query of the site scores
the pieces, the best are merged and put in place at once, so that deeper sites see them in the
same pass. The weights, averaged over the batches, are the recipe: a target stores that, not
tensors.

References
----------
Tan, Liu and Jiang, "Personalized Pieces", EMNLP 2024, section 3.3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from fl_perpcs.assembly.choosing import Choice, select
from fl_perpcs.assembly.merging import Recipe, merge, on_device
from fl_perpcs.assembly.scoring import Scorer, example_queries, find_scorer, with_fit
from fl_perpcs.config import AssemblySection
from fl_perpcs.lm import LM, empty_site, put_factors
from fl_perpcs.pool import Stack
from fl_perpcs.text import Batch

Queries = dict[str, Tensor]
"""The query of each site, (d_in,), float32."""


def choose(
    lm: LM,
    stacks: Mapping[str, Stack],
    batch: Batch,
    how: AssemblySection,
    generator: torch.Generator | None = None,
    population: Mapping[str, Tensor] | None = None,
    fit: Mapping[str, float] | None = None,
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
        Of sampled selections.
    population : mapping of str to Tensor, optional
        The population's query of each site, for scorers that look at it.
    fit : mapping of str to float, optional
        Added to the scores of each sharer's pieces: what a first pass found.

    Returns
    -------
    dict of str to Choice
    """
    scorer, choices = find_scorer(how.scorer), {}

    def visit(site: str, layer: LoraLayer, queries: Tensor) -> None:
        if site not in stacks:
            empty_site(layer)
            return
        scores = _scores(scorer, stacks[site], site, queries.mean(dim=0), how, population)
        scores = with_fit(scores, stacks[site].sharers, fit)
        choices[site] = select(scores, how, generator)
        put_factors(layer, merge(stacks[site], choices[site], how.merge))

    with visiting(lm, batch, visit):
        _forward(lm, batch)
    return choices


def assemble(
    lm: LM,
    stacks: Mapping[str, Stack],
    batches: Sequence[Batch],
    how: AssemblySection,
    seed: int,
    population: Mapping[str, Tensor] | None = None,
    fit: Mapping[str, float] | None = None,
) -> Recipe:
    """Return the weights that :func:`choose` chooses, averaged over the batches of a history.

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
    population, fit : optional
        As in :func:`choose`.

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
        for site, choice in choose(lm, stacks, batch, how, generator, population, fit).items():
            totals[site][choice.indices.cpu()] += choice.weights.double().cpu()
    return {
        site: {
            stacks[site].sharers[i]: float(total[i]) / len(batches)
            for i in total.nonzero().flatten().tolist()
        }
        for site, total in totals.items()
    }


def history_queries(lm: LM, batches: Sequence[Batch]) -> Queries:
    """Return each site's query over a whole history, from the base LLM: the slot is emptied.

    Every example counts the same, whatever batch it is in.
    """
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(lm.sites, 0)

    def visit(site: str, layer: LoraLayer, queries: Tensor) -> None:
        sums[site] = sums.get(site, torch.zeros((), device=lm.device)) + queries.sum(dim=0)
        counts[site] += len(queries)

    for layer in lm.sites.values():
        empty_site(layer)
    for batch in batches:
        with visiting(lm, batch, visit):
            _forward(lm, batch)
    return {site: total / max(counts[site], 1) for site, total in sums.items()}


def score_pool(
    queries: Queries,
    stacks: Mapping[str, Stack],
    how: AssemblySection,
    population: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the scores of all pieces by site, (n,), for queries that are known already."""
    scorer = find_scorer(how.scorer)
    return {
        site: _scores(scorer, stack, site, queries[site], how, population)
        for site, stack in stacks.items()
    }


@contextmanager
def visiting(
    lm: LM, batch: Batch, visit: Callable[[str, LoraLayer, Tensor], None]
) -> Iterator[None]:
    """Call ``visit(site, layer, queries of the examples)`` before each site's forward."""
    predicts_response = batch.predicts_response.to(lm.device)

    def hook_for(site: str) -> Any:
        def hook(layer: LoraLayer, args: tuple[Tensor, ...]) -> None:
            visit(site, layer, example_queries(args[0], predicts_response))

        return hook

    hooks = [
        layer.register_forward_pre_hook(hook_for(site))  # type: ignore[attr-defined]
        for site, layer in lm.sites.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _forward(lm: LM, batch: Batch) -> None:
    lm.model.eval()
    moved = batch.to(lm.device)
    # Not inference_mode: what is put in the slot may be trained later.
    with torch.no_grad():
        # No logits are needed but the last: the sites are all below the head.
        lm.model(
            input_ids=moved.input_ids,
            attention_mask=moved.attention_mask,
            logits_to_keep=1,
            use_cache=False,
        )


def _scores(
    scorer: Scorer,
    stack: Stack,
    site: str,
    query: Tensor,
    how: AssemblySection,
    population: Mapping[str, Tensor] | None,
) -> Tensor:
    mean = None if population is None else population[site].to(query)
    return scorer(stack.gates, query, mean, how.popularity)
