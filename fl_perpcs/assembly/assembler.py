"""A target's recipe, made as the config says."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_perpcs.assembly.choosing import select
from fl_perpcs.assembly.looking import learn_mixing, rerank
from fl_perpcs.assembly.merging import Recipe, keep, normalized, on_device, whole
from fl_perpcs.assembly.passes import assemble, history_queries, score_pool
from fl_perpcs.assembly.scoring import mean_over_sites, with_fit
from fl_perpcs.config import Config
from fl_perpcs.lm import LM
from fl_perpcs.pool import Stack
from fl_perpcs.text import Encoded, in_batches


def make_recipe(
    lm: LM,
    stacks: Mapping[str, Stack],
    history: Sequence[Encoded],
    config: Config,
    seed: int,
    population: Mapping[str, Tensor] | None = None,
) -> tuple[Recipe, int]:
    """Assemble: a first pass and a shortlist, then a choice, then learned mixing.

    Each but the choice is off by default; what remains then is the published method.

    Parameters
    ----------
    lm : LM
    stacks : mapping of str to Stack
        The pool by site.
    history : sequence of Encoded
        The target's.
    config : Config
        Its ``assembly``, ``rerank`` and ``mixing``.
    seed : int
        Of sampled selections and of the order in which mixing sees the history.
    population : mapping of str to Tensor, optional
        The population's query of each site, (d_in,).

    Returns
    -------
    recipe : Recipe
    trained : int
        How many numbers were trained.
    """
    how, pad = config.assembly, int(lm.tokenizer.pad_token_id)  # type: ignore[arg-type]
    batches = in_batches(history[-how.max_history :], how.batch_size, pad)
    stacks = on_device(stacks, lm.device)
    fit: dict[str, float] | None = None
    first: dict[str, Tensor] = {}
    if how.shortlist or how.passes == 2 or how.per == "history":
        first = score_pool(history_queries(lm, batches), stacks, how, population)
        fit = mean_over_sites(first, {site: stack.sharers for site, stack in stacks.items()})
    if how.shortlist and fit is not None:
        best = sorted(fit, key=fit.__getitem__, reverse=True)[: how.shortlist]
        first = {
            site: first[site][[i for i, s in enumerate(stack.sharers) if s in best]]
            for site, stack in stacks.items()
        }
        stacks = keep(stacks, best)
    if how.passes == 1:
        fit = None
    if config.rerank.items:
        looked_at = in_batches(history[-config.rerank.items :], how.batch_size, pad)
        recipe = normalized(whole(rerank(lm, stacks, looked_at, config.rerank.sharpness), stacks))
    elif how.per == "history":
        recipe = _choose_once(first, stacks, config, seed, fit)
    else:
        recipe = assemble(lm, stacks, batches, how, seed, population, fit)
    if config.mixing.per == "none":
        return recipe, 0
    return learn_mixing(lm, stacks, recipe, history, config.mixing, how.merge, seed)


def _choose_once(
    scores: Mapping[str, Tensor],
    stacks: Mapping[str, Stack],
    config: Config,
    seed: int,
    fit: Mapping[str, float] | None,
) -> Recipe:
    """Choose once over the whole history, by the scores of the first pass."""
    generator = torch.Generator().manual_seed(seed)
    recipe = {}
    for site, stack in stacks.items():
        found = with_fit(scores[site], stack.sharers, fit)
        choice = select(found, config.assembly, generator)
        recipe[site] = {
            stack.sharers[i]: weight
            for i, weight in zip(choice.indices.tolist(), choice.weights.tolist(), strict=True)
        }
    return recipe
