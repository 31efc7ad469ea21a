"""A target that lets the server match: it sends queries and is sent what the server merged."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_perpcs.assembly.passes import Queries, batch_queries, over_history
from fl_perpcs.assembly.stages import Front, ask
from fl_perpcs.disk import Drawer
from fl_perpcs.exchange.saved_front import load_front, save_front
from fl_perpcs.node import Job, exchange_drawer
from fl_perpcs.pieces import Factors
from fl_perpcs.seeds import derive_seed


def all_queries(job: Job) -> Queries:
    """Return what the server matches, from the base LLM: a row for each batch, or for all."""
    queries, examples = batch_queries(job.lm, job.choosing_batches)
    if job.config.assembly.per == "history":
        queries = {site: query[None] for site, query in over_history(queries, examples).items()}
    return _noisy(job, queries)


def first_queries(job: Job, run: int) -> tuple[Queries, bool]:
    """Begin an exchange in which the server matches stage by stage.

    Returns
    -------
    queries : dict of str to Tensor
        Of the first sites, (batches, d_in).
    more : bool
        Whether other sites will follow.
    """
    drawer = exchange_drawer(job, run)
    drawer.clear()
    return _next_queries(job, drawer, Front())


def next_queries(job: Job, run: int, factors: Mapping[str, Tensor]) -> tuple[Queries, bool]:
    """Put merged factors in place, named ``<batch> <site>.lora_A``, and go on."""
    drawer = exchange_drawer(job, run)
    front, _ = load_front(drawer)
    for name, tensor in factors.items():
        number, _, rest = name.partition(" ")
        site, _, part = rest.rpartition(".")
        if part == "lora_A":
            both = Factors(tensor, factors[f"{number} {site}.lora_B"])
            front.factors[int(number)][site] = both
    return _next_queries(job, drawer, front)


def _next_queries(job: Job, drawer: Drawer, front: Front) -> tuple[Queries, bool]:
    sites = job.lm.sites
    queries, front = ask(job.lm, job.choosing_batches, sites, front)
    more = len(front.asked) < len(sites)
    if more:
        save_front(drawer, front)
    else:
        drawer.clear()
    return _noisy(job, queries), more


def _noisy(job: Job, queries: Queries) -> Queries:
    """Add the noise that ``exchange.query-noise`` asks for; docs/privacy.md says what it buys."""
    spread = job.config.exchange.query_noise
    if not spread:
        return queries
    noisy = {}
    for site, rows in queries.items():
        draw = torch.Generator().manual_seed(derive_seed(job.seed("query noise"), site))
        noisy[site] = rows + spread * torch.randn(rows.shape, generator=draw).to(rows.device)
    return noisy
