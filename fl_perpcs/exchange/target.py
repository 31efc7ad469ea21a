"""What a target does in the middle of an exchange: choose, ask, and put together what comes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_perpcs.assembly import Recipe, Request, merge, on_device, pick
from fl_perpcs.assembly.assembler import batches_of, choose_once, finish_recipe, named, narrow
from fl_perpcs.assembly.passes import (
    Queries,
    assemble_at_once,
    batch_queries,
    choose_at,
    history_queries,
    over_history,
)
from fl_perpcs.assembly.stages import Front, ask
from fl_perpcs.disk import Drawer
from fl_perpcs.node import Job
from fl_perpcs.pieces import Adapter, Factors
from fl_perpcs.pool import Stack, name_stacks, stacks_of
from fl_perpcs.seeds import assembly_seed, derive_seed
from fl_perpcs.text import Batch

Weights = dict[str, dict[str, float]]
"""What one batch chose: weights of sharers by site, best first."""


@dataclass
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
    drawer = _drawer(job, run)
    drawer.clear()
    drawer.put("gates", {**name_stacks(gates, factors=False)})
    drawer.put("population", dict(population or {}))
    if job.config.exchange.protocol == "layerwise":
        how, batches = job.config.assembly, _batches(job)
        stacks = on_device(gates, job.lm.device)
        found = narrow(stacks, how, lambda: history_queries(job.lm, batches), population)
        drawer.put("front", {}, {"chosen": [{} for _ in batches]})
        drawer.put("pieces", {})
        allowed = {site: list(stack.sharers) for site, stack in found.stacks.items()}
        drawer.put("narrowed", {}, {"allowed": allowed, "fit": found.fit})
        return _go_on(job, drawer, Front())
    recipe, wanted = _chosen_at_once(job, gates, population)
    drawer.put("choice", {}, recipe)
    return Asking(_with_decoys(job, wanted, gates), more=False)


def advance(job: Job, run: int, pieces: Mapping[str, Stack]) -> Asking:
    """Put the pieces of a stage in place, go on, and ask for the next ones (layerwise)."""
    drawer = _drawer(job, run)
    return _go_on(job, drawer, _with_pieces(job, drawer, pieces))


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
    drawer = _drawer(job, run)
    if job.config.exchange.protocol == "layerwise":
        _with_pieces(job, drawer, pieces)
        stacks = stacks_of(drawer.take("pieces")[0])
        _, facts = drawer.take("front")
        recipe = _mean(facts["chosen"], stacks)
    else:
        _, recipe = drawer.take("choice")
        stacks = pick(pieces, recipe) if recipe else dict(pieces)
    drawer.clear()
    stacks = on_device(stacks, job.lm.device)
    seed = assembly_seed(job.config.seed, job.user.id)
    done, trained = finish_recipe(job.lm, stacks, recipe or None, job.history, job.config, seed)
    return done, stacks, trained


def all_queries(job: Job) -> Queries:
    """Return what the server matches, from the base LLM: a row for each batch, or for all."""
    queries, examples = batch_queries(job.lm, _batches(job))
    if job.config.assembly.per == "batch":
        return queries
    return {site: query[None] for site, query in over_history(queries, examples).items()}


def first_queries(job: Job, run: int) -> tuple[Queries, bool]:
    """Begin an exchange in which the server matches stage by stage.

    Returns
    -------
    queries : dict of str to Tensor
        Of the first sites, (batches, d_in).
    more : bool
        Whether other sites will follow.
    """
    drawer = _drawer(job, run)
    drawer.clear()
    return _next_queries(job, drawer, Front())


def next_queries(job: Job, run: int, factors: Mapping[str, Tensor]) -> tuple[Queries, bool]:
    """Put merged factors in place, named ``<batch> <site>.lora_A``, and go on."""
    drawer = _drawer(job, run)
    front, _ = _read_front(*drawer.take("front"))
    for name, tensor in factors.items():
        number, _, rest = name.partition(" ")
        site, _, part = rest.rpartition(".")
        if part == "lora_A":
            both = Factors(tensor, factors[f"{number} {site}.lora_B"])
            front.factors[int(number)][site] = both
    return _next_queries(job, drawer, front)


def lacking(job: Job, digests: Mapping[str, Tensor]) -> Asking:
    """Ask for the pieces of a pool that the cache lacks.

    Parameters
    ----------
    digests : mapping of str to Tensor
        As :func:`fl_perpcs.exchange.broadcast.piece_digests` has them.
    """
    drawer = _cache(job)
    drawer.put("offer", dict(digests))
    known = set(drawer.take("pieces")[1]) if drawer.has("pieces") else set()
    request = {
        site: tuple(sharer for sharer, digest in found if f"{site} {digest}" not in known)
        for site, found in _digests(digests).items()
    }
    return Asking({site: wanted for site, wanted in request.items() if wanted}, more=False)


def completed(job: Job, pieces: Mapping[str, Stack]) -> dict[str, Stack]:
    """Return the whole pool that was offered, from what came and the cache, and cache it."""
    drawer = _cache(job)
    held: dict[str, Tensor] = drawer.take("pieces")[0] if drawer.has("pieces") else {}
    offer = _digests(drawer.take("offer")[0])
    # What was sent is known by the sender's digests, whatever the wire format did to it.
    for site, stack in pieces.items():
        digest_of = dict(offer[site])
        for i, sharer in enumerate(stack.sharers):
            for part in ("A", "B", "gates"):
                held[f"{site} {digest_of[sharer]} {part}"] = getattr(stack, part)[i]
    stacks = {}
    for site, found in offer.items():
        A, B, gates = (
            torch.stack([held[f"{site} {digest} {part}"] for _, digest in found])
            for part in ("A", "B", "gates")
        )
        stacks[site] = Stack(tuple(sharer for sharer, _ in found), A, B, gates)
    wanted = [f"{site} {digest}" for site, found in offer.items() for _, digest in found]
    parts = {f"{key} {part}" for key in wanted for part in ("A", "B", "gates")}
    drawer.put("pieces", {key: held[key] for key in sorted(parts)}, sorted(set(wanted)))
    return stacks


def _chosen_at_once(
    job: Job, gates: Mapping[str, Stack], population: Mapping[str, Tensor] | None
) -> tuple[Recipe | None, Request]:
    """Return what is chosen by the base LLM's activations, and which pieces that takes."""
    how = job.config.assembly
    seed = assembly_seed(job.config.seed, job.user.id)
    stacks = on_device(gates, job.lm.device)
    queries, examples = batch_queries(job.lm, _batches(job))
    found = narrow(stacks, how, lambda: over_history(queries, examples), population)
    if job.config.rerank.items:
        return None, {site: stack.sharers for site, stack in found.stacks.items()}
    if how.per == "history":
        recipe = choose_once(found, how, seed)
    else:
        recipe = assemble_at_once(queries, found.stacks, how, seed, population, found.fit)
    return recipe, {site: tuple(weights) for site, weights in recipe.items()}


def _go_on(job: Job, drawer: Drawer, front: Front) -> Asking:
    """Run to the next sites, choose there, and keep what is needed to go on (layerwise)."""
    how, batches = job.config.assembly, _batches(job)
    gates = stacks_of(drawer.take("gates")[0])
    population = drawer.take("population")[0] or None
    _, facts = drawer.take("narrowed")
    stacks = on_device(pick(gates, facts["allowed"]), job.lm.device)
    _, before = drawer.take("front")
    chosen: list[Weights] = before["chosen"]
    queries, front = ask(job.lm, batches, stacks, front)
    seed = assembly_seed(job.config.seed, job.user.id)
    for site, rows in queries.items():
        for number, row in enumerate(rows):
            batch_seed = derive_seed(seed, number)
            choice = choose_at(site, stacks[site], row, how, batch_seed, population, facts["fit"])
            chosen[number][site] = named(choice, stacks[site])
    _write_front(drawer, front, chosen=chosen, pending=list(queries))
    wanted = {site: sorted({s for c in chosen for s in c[site]}) for site in queries}
    return Asking(_with_decoys(job, wanted, gates), more=len(front.asked) < len(stacks))


def _with_pieces(job: Job, drawer: Drawer, pieces: Mapping[str, Stack]) -> Front:
    """Merge the pieces of a stage for each batch, and keep them."""
    front, facts = _read_front(*drawer.take("front"))
    wanted = {site: {s for c in facts["chosen"] for s in c[site]} for site in facts["pending"]}
    stacks = pick(pieces, {site: tuple(sharers) for site, sharers in wanted.items()})
    for number, chosen in enumerate(facts["chosen"]):
        for site, stack in stacks.items():
            at = {stack.sharers.index(s): weight for s, weight in chosen[site].items()}
            front.factors[number][site] = merge(stack, at, job.config.assembly.merge)
    held, _ = drawer.take("pieces")
    drawer.put("pieces", {**held, **name_stacks(stacks, gates=False)})
    return front


def _next_queries(job: Job, drawer: Drawer, front: Front) -> tuple[Queries, bool]:
    sites = job.lm.sites
    queries, front = ask(job.lm, _batches(job), sites, front)
    more = len(front.asked) < len(sites)
    if more:
        _write_front(drawer, front)
    else:
        drawer.clear()
    return queries, more


def _write_front(drawer: Drawer, front: Front, **facts: Any) -> None:
    tensors = {f"input {number}": x for number, x in enumerate(front.inputs)}
    for number, adapter in enumerate(front.factors):
        tensors |= _named_factors(number, adapter)
    drawer.put("front", tensors, {"layer": front.layer, "asked": front.asked, **facts})


def _named_factors(number: int, adapter: Adapter) -> dict[str, Tensor]:
    return {
        f"factor {part} {number} {site}": factor
        for site, both in adapter.items()
        for part, factor in zip("AB", both, strict=True)
    }


def _read_front(tensors: Mapping[str, Tensor], facts: Any) -> tuple[Front, Any]:
    inputs = [tensors[f"input {n}"] for n in range(sum(k.startswith("input") for k in tensors))]
    front = Front(facts["layer"], inputs, facts["asked"], [{} for _ in inputs])
    for key in tensors:
        if key.startswith("factor A "):
            _, _, number, site = key.split(" ")
            both = Factors(tensors[key], tensors[f"factor B {number} {site}"])
            front.factors[int(number)][site] = both
    return front, facts


def _mean(chosen: list[Weights], stacks: Mapping[str, Stack]) -> Recipe:
    """Return the mean of the batches' weights, as :func:`averaged` does."""
    recipe: Recipe = {}
    for site, stack in stacks.items():
        totals = dict.fromkeys(stack.sharers, 0.0)
        for weights in chosen:
            for sharer, weight in weights[site].items():
                totals[sharer] += weight
        recipe[site] = {sharer: total / len(chosen) for sharer, total in totals.items() if total}
    return recipe


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


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, str]]]:
    """Return by site (sharer, digest) of each piece."""
    return {
        site: [
            (sharer, bytes(digest).hex())
            for sharer, digest in zip(
                stack.sharers, tensors[f"{site}.digests"].tolist(), strict=True
            )
        ]
        for site, stack in stacks_of(tensors).items()
    }


def _batches(job: Job) -> list[Batch]:
    job.history_batches(1)  # tells if no item is left
    return batches_of(job.lm, job.history, job.config)


def _drawer(job: Job, run: int) -> Drawer:
    return Drawer(f"run {run}", job.user.id)


def _cache(job: Job) -> Drawer:
    # Decoded pieces differ by format.
    return Drawer("cache", job.user.id, job.config.exchange.format)
