"""A target that has not got the pool: it chooses by gates and asks for pieces.

For the protocols layerwise and one-shot.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fl_perpcs.assembly import Recipe, Request, merge, on_device, pick
from fl_perpcs.assembly.assembler import choose_once, finish_recipe, narrow
from fl_perpcs.assembly.merging import as_choice, named
from fl_perpcs.assembly.passes import (
    assemble_at_once,
    averaged,
    batch_queries,
    choose_at,
    history_queries,
    over_history,
)
from fl_perpcs.assembly.stages import Front, ask
from fl_perpcs.disk import Drawer
from fl_perpcs.errors import PerPcsError
from fl_perpcs.exchange.saved_front import load_front, save_front
from fl_perpcs.node import Job, exchange_drawer
from fl_perpcs.pool import Stack, name_stacks, stacks_of
from fl_perpcs.seeds import assembly_seed, derive_seed

Weights = dict[str, dict[str, float]]
"""What one batch chose: weights of sharers by site, best first."""


@dataclass(frozen=True)
class Asking:
    """A request, and whether another will follow."""

    request: dict[str, tuple[str, ...]]
    more: bool


def choose(
    job: Job, run: int, gates: Mapping[str, Stack], population: Mapping[str, Tensor] | None
) -> Asking:
    """Begin an exchange with the pool's gates, and ask for the first pieces.

    Parameters
    ----------
    job : Job
    run : int
        Flower's id of the run: several may be under way.
    gates : mapping of str to Stack
        The pool without factors.
    population : mapping of str to Tensor, optional
    """
    drawer = exchange_drawer(job, run)
    drawer.clear()
    if job.config.exchange.protocol == "layerwise":
        how, batches = job.config.assembly, job.choosing_batches
        stacks = on_device(gates, job.lm.device)
        found = narrow(stacks, how, lambda: history_queries(job.lm, batches), population)
        drawer.put("gates", name_stacks(gates, factors=False))
        drawer.put("population", dict(population or {}))
        allowed = {site: list(stack.sharers) for site, stack in found.stacks.items()}
        drawer.put("narrowed", {}, {"allowed": allowed, "fit": found.fit})
        return _go_on(job, drawer, Front(), [{} for _ in batches], 0)
    recipe, wanted = _chosen_at_once(job, gates, population)
    drawer.put("choice", {}, {"recipe": recipe, "wanted": wanted})
    return Asking(_with_decoys(job, wanted, gates), more=False)


def advance(job: Job, run: int, pieces: Mapping[str, Stack]) -> Asking:
    """Put the pieces of a stage in place, go on, and ask for the next ones (layerwise)."""
    drawer = exchange_drawer(job, run)
    return _go_on(job, drawer, *_with_pieces(job, drawer, pieces))


def finish(job: Job, run: int, pieces: Mapping[str, Stack]) -> tuple[Recipe, dict[str, Stack], int]:
    """Put the last pieces to the others and make the recipe.

    Returns
    -------
    recipe : Recipe
    stacks : dict of str to Stack
        All pieces of it.
    trained : int
        How many numbers were trained.
    """
    drawer = exchange_drawer(job, run)
    if job.config.exchange.protocol == "layerwise":
        _, chosen, stages = _with_pieces(job, drawer, pieces)
        held = [drawer.take(f"pieces-{stage}")[0] for stage in range(stages)]
        stacks = {site: s for tensors in held for site, s in stacks_of(tensors).items()}
        recipe = averaged(
            [{site: as_choice(stack, c[site]) for site, stack in stacks.items()} for c in chosen],
            stacks,
        )
    else:
        _, choice = drawer.take("choice")
        recipe, stacks = choice["recipe"], _delivered(pieces, choice["wanted"])
    drawer.clear()
    stacks = on_device(stacks, job.lm.device)
    seed = assembly_seed(job.config.seed, job.user.id)
    done, trained = finish_recipe(job.lm, stacks, recipe, job.history, job.config, seed)
    return done, stacks, trained


def _chosen_at_once(
    job: Job, gates: Mapping[str, Stack], population: Mapping[str, Tensor] | None
) -> tuple[Recipe | None, Request]:
    """Return what is chosen by the base LLM's activations, and which pieces that takes."""
    how = job.config.assembly
    seed = assembly_seed(job.config.seed, job.user.id)
    stacks = on_device(gates, job.lm.device)
    queries, examples = batch_queries(job.lm, job.choosing_batches)
    found = narrow(stacks, how, lambda: over_history(queries, examples), population)
    if job.config.rerank.items:
        return None, {site: stack.sharers for site, stack in found.stacks.items()}
    if how.per == "history":
        recipe = choose_once(found, how, seed)
    else:
        recipe = assemble_at_once(queries, found.stacks, how, seed, population, found.fit)
    return recipe, {site: tuple(weights) for site, weights in recipe.items()}


def _go_on(job: Job, drawer: Drawer, front: Front, chosen: list[Weights], stage: int) -> Asking:
    """Run to the next sites, choose there, and keep what is needed to go on (layerwise)."""
    how, batches = job.config.assembly, job.choosing_batches
    gates = stacks_of(drawer.take("gates")[0])
    population = drawer.take("population")[0] or None
    _, facts = drawer.take("narrowed")
    stacks = on_device(pick(gates, facts["allowed"]), job.lm.device)
    queries, front = ask(job.lm, batches, stacks, front)
    seed = assembly_seed(job.config.seed, job.user.id)
    for site, rows in queries.items():
        for number, row in enumerate(rows):
            batch_seed = derive_seed(seed, number)
            choice = choose_at(site, stacks[site], row, how, batch_seed, population, facts["fit"])
            chosen[number][site] = named(stacks[site], choice)
    wanted = {site: sorted({s for c in chosen for s in c[site]}) for site in queries}
    save_front(drawer, front, chosen=chosen, wanted=wanted, stage=stage)
    return Asking(_with_decoys(job, wanted, gates), more=len(front.asked) < len(stacks))


def _with_pieces(
    job: Job, drawer: Drawer, pieces: Mapping[str, Stack]
) -> tuple[Front, list[Weights], int]:
    """Merge the pieces of a stage for each batch, and keep them (layerwise).

    Returns
    -------
    front : Front
    chosen : list of dict
        What each batch has chosen so far.
    stages : int
        How many there were.
    """
    front, facts = load_front(drawer)
    stacks, stage = _delivered(pieces, facts["wanted"]), facts["stage"]
    for number, chosen in enumerate(facts["chosen"]):
        for site, stack in stacks.items():
            choice = as_choice(stack, chosen[site])
            front.factors[number][site] = merge(stack, choice, job.config.assembly.merge)
    drawer.put(f"pieces-{stage}", name_stacks(stacks, gates=False))
    return front, facts["chosen"], stage + 1


def _delivered(pieces: Mapping[str, Stack], wanted: Request) -> dict[str, Stack]:
    """Return the pieces that were wanted, without the decoys.

    Raises
    ------
    PerPcsError
        If one of them did not come.
    """
    found = pick(pieces, wanted)
    for site, sharers in wanted.items():
        came = found[site].sharers if site in found else ()
        if missing := sorted(set(sharers) - set(came)):
            raise PerPcsError(
                f"the piece of sharer number {missing[0]} at {site!r} was asked for and not sent"
            )
    return found


def _with_decoys(
    job: Job, wanted: Request, gates: Mapping[str, Stack]
) -> dict[str, tuple[str, ...]]:
    """Return a request with pieces that are not wanted among those that are."""
    request = {}
    for site, sharers in wanted.items():
        others = sorted(set(gates[site].sharers) - set(sharers))
        draw = random.Random(derive_seed(job.seed("decoys"), site))
        decoys = draw.sample(others, min(job.config.exchange.decoys, len(others)))
        request[site] = tuple(sorted([*sharers, *decoys]))
    return request
