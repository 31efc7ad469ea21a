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
from fl_perpcs.lm import LM, empty_site, put_adapter, put_factors
from fl_perpcs.pool import Stack
from fl_perpcs.seeds import derive_seed
from fl_perpcs.text import Batch

Queries = dict[str, Tensor]
"""The query of each site, (d_in,), or a row for each batch, (batches, d_in); float32."""


def choose_at(
    site: str,
    stack: Stack,
    query: Tensor,
    how: AssemblySection,
    seed: int,
    population: Mapping[str, Tensor] | None = None,
    fit: Mapping[str, float] | None = None,
) -> Choice:
    """Choose among the pieces of one site for one query, (d_in,).

    Sampled selections draw by seed and site, so it does not matter which site comes first.
    """
    scores = _scores(find_scorer(how.scorer), stack, site, query, how, population)
    return choose_by(scores, site, stack, how, seed, fit)


def choose_by(
    scores: Tensor,
    site: str,
    stack: Stack,
    how: AssemblySection,
    seed: int,
    fit: Mapping[str, float] | None = None,
) -> Choice:
    """Choose among the pieces of one site by their scores, (n,), as :func:`choose_at` does."""
    sampled = how.selection.startswith("sample")
    generator = torch.Generator().manual_seed(derive_seed(seed, site)) if sampled else None
    return select(with_fit(scores, stack.sharers, fit), how, generator)


def choose(
    lm: LM,
    stacks: Mapping[str, Stack],
    batch: Batch,
    how: AssemblySection,
    seed: int = 0,
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
    seed : int
        Of sampled selections.
    population : mapping of str to Tensor, optional
        The population's query of each site, for scorers that look at it.
    fit : mapping of str to float, optional
        Added to the scores of each sharer's pieces: what a first pass found.

    Returns
    -------
    dict of str to Choice
    """
    choices: dict[str, Choice] = {}
    predicts_response = batch.predicts_response.to(lm.device)

    def visit(site: str, layer: LoraLayer, x: Tensor) -> None:
        if site not in stacks:
            empty_site(layer)
            return
        query = example_queries(x, predicts_response).mean(dim=0)
        choices[site] = choose_at(site, stacks[site], query, how, seed, population, fit)
        put_factors(layer, merge(stacks[site], choices[site], how.merge))

    with watching(lm, visit):
        forward(lm, batch)
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
    stacks = on_device(stacks, lm.device)
    choices = [
        choose(lm, stacks, batch, how, derive_seed(seed, number), population, fit)
        for number, batch in enumerate(batches)
    ]
    return averaged(choices, stacks)


def assemble_at_once(
    queries: Queries,
    stacks: Mapping[str, Stack],
    how: AssemblySection,
    seed: int,
    population: Mapping[str, Tensor] | None = None,
    fit: Mapping[str, float] | None = None,
) -> Recipe:
    """Return the weights that batches choose by queries from the base LLM, at all sites at once.

    An approximation of :func:`assemble`, where deeper sites see what was chosen above.

    Parameters
    ----------
    queries : dict of str to Tensor
        Of each site, a row for each batch: (batches, d_in).
    stacks : mapping of str to Stack
        On the device of the queries; factors are not looked at.
    how, seed, population, fit
        As in :func:`assemble`.

    Returns
    -------
    Recipe
    """
    choices = [
        {
            site: choose_at(
                site, stack, queries[site][number], how, derive_seed(seed, number), population, fit
            )
            for site, stack in stacks.items()
        }
        for number in range(len(next(iter(queries.values()))))
    ]
    return averaged(choices, stacks)


def averaged(choices: Sequence[Mapping[str, Choice]], stacks: Mapping[str, Stack]) -> Recipe:
    """Return the mean of the batches' weights; sharers in the order of the stack."""
    recipe: Recipe = {}
    for site, stack in stacks.items():
        total = torch.zeros(len(stack.sharers), dtype=torch.float64)
        for chosen in choices:
            total[chosen[site].indices.cpu()] += chosen[site].weights.double().cpu()
        recipe[site] = {
            stack.sharers[i]: float(total[i]) / len(choices)
            for i in total.nonzero().flatten().tolist()
        }
    return recipe


def batch_queries(lm: LM, batches: Sequence[Batch]) -> tuple[Queries, Tensor]:
    """Return each site's query over each batch, from the base LLM: the slot is emptied.

    Returns
    -------
    queries : dict of str to Tensor
        (batches, d_in), float32.
    examples : Tensor
        How many examples each is the mean of, (batches,).
    """
    rows: dict[str, list[Tensor]] = {site: [] for site in lm.sites}
    put_adapter(lm, {})
    for batch in batches:
        predicts_response = batch.predicts_response.to(lm.device)

        def visit(
            site: str, layer: LoraLayer, x: Tensor, where: Tensor = predicts_response
        ) -> None:
            rows[site].append(example_queries(x, where).mean(dim=0))

        with watching(lm, visit):
            forward(lm, batch)
    counts = [int(batch.predicts_response.any(dim=1).sum()) for batch in batches]
    queries = {site: torch.stack(found) for site, found in rows.items()}
    return queries, torch.tensor(counts, device=lm.device)


def over_history(queries: Queries, examples: Tensor) -> Queries:
    """Return each site's query over a whole history, (d_in,): every example counts the same."""
    weights = examples / examples.sum()
    return {site: weights @ rows for site, rows in queries.items()}


def history_queries(lm: LM, batches: Sequence[Batch]) -> Queries:
    """Return each site's query over a whole history, (d_in,), from the base LLM."""
    return over_history(*batch_queries(lm, batches))


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
def watching(lm: LM, visit: Callable[[str, LoraLayer, Tensor], None]) -> Iterator[None]:
    """Call ``visit(site, layer, input)`` before each site's forward; (batch, tokens, d_in)."""

    def hook_for(site: str) -> Any:
        def hook(layer: LoraLayer, args: tuple[Tensor, ...]) -> None:
            visit(site, layer, args[0])

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


def forward(lm: LM, batch: Batch) -> None:
    """Run a batch through the base LLM with what is in the slot."""
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
