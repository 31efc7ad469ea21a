"""A target's recipe, made as the config says."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fl_perpcs.assembly.looking import learn_mixing, rerank
from fl_perpcs.assembly.merging import Recipe, keep, named, normalized, on_device, whole
from fl_perpcs.assembly.passes import Queries, assemble, choose_by, history_queries, score_pool
from fl_perpcs.assembly.scoring import mean_over_sites
from fl_perpcs.config import AssemblySection, Config
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
    how = config.assembly
    batches = in_batches(history[-how.max_history :], how.batch_size, lm.pad)
    found = narrow(
        on_device(stacks, lm.device), how, lambda: history_queries(lm, batches), population
    )
    recipe = None
    if how.per == "history":
        recipe = choose_once(found, how, seed)
    elif not config.rerank.items:
        recipe = assemble(lm, found.stacks, batches, how, seed, population, found.fit)
    return finish_recipe(lm, found.stacks, recipe, history, config, seed)


class Narrowed(NamedTuple):
    """What gates alone say of a pool, by queries from the base LLM.

    Attributes
    ----------
    stacks : dict of str to Stack
        The pool, or the pieces of the shortlist.
    scores : dict of str to Tensor
        Of its pieces, (n,); empty if no option asks for them.
    fit : dict of str to float, optional
        What to add to the scores of each sharer's pieces in the choice.
    """

    stacks: dict[str, Stack]
    scores: dict[str, Tensor]
    fit: dict[str, float] | None


def narrow(
    stacks: Mapping[str, Stack],
    how: AssemblySection,
    queries: Callable[[], Queries],
    population: Mapping[str, Tensor] | None = None,
) -> Narrowed:
    """Take the first pass and the shortlist, as far as they are asked for.

    Parameters
    ----------
    stacks : mapping of str to Stack
        Factors are not looked at.
    how : AssemblySection
    queries : callable
        Returns the queries over the whole history; called only if they are needed.
    population : mapping of str to Tensor, optional
    """
    if not (how.shortlist or how.passes == 2 or how.per == "history"):
        return Narrowed(dict(stacks), {}, None)
    scores = score_pool(queries(), stacks, how, population)
    fit = mean_over_sites(scores, {site: stack.sharers for site, stack in stacks.items()})
    if how.shortlist:
        best = sorted(fit, key=fit.__getitem__, reverse=True)[: how.shortlist]
        scores = {
            site: scores[site][[i for i, s in enumerate(stack.sharers) if s in best]]
            for site, stack in stacks.items()
        }
        stacks = keep(stacks, best)
    return Narrowed(dict(stacks), scores, fit if how.passes == 2 else None)


def finish_recipe(
    lm: LM,
    stacks: Mapping[str, Stack],
    recipe: Recipe | None,
    history: Sequence[Encoded],
    config: Config,
    seed: int,
) -> tuple[Recipe, int]:
    """Rerank whole adapters in place of a choice, and learn mixing, as far as asked for.

    Parameters
    ----------
    stacks : mapping of str to Stack
        With the factors of all pieces that may be in the recipe, on the model's device.
    recipe : Recipe, optional
        What was chosen, if anything was.

    Returns
    -------
    recipe : Recipe
    trained : int
    """
    how = config.assembly
    if config.rerank.items:
        looked_at = in_batches(history[-config.rerank.items :], how.batch_size, lm.pad)
        recipe = normalized(whole(rerank(lm, stacks, looked_at, config.rerank.sharpness), stacks))
    assert recipe is not None
    if config.mixing.per == "none":
        return recipe, 0
    return learn_mixing(lm, stacks, recipe, history, config.mixing, how.merge, seed)


def choose_once(found: Narrowed, how: AssemblySection, seed: int) -> Recipe:
    """Choose once over the whole history, by the scores of the first pass."""
    return {
        site: named(stack, choose_by(found.scores[site], site, stack, how, seed, found.fit))
        for site, stack in found.stacks.items()
    }
