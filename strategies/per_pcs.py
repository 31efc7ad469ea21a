"""Personalized Pieces (Tan, Liu and Jiang, EMNLP 2024)."""

from collections.abc import Generator
from dataclasses import replace

import torch
from flwr.app import Message

from fl_perpcs.exchange import find_protocol, offered
from fl_perpcs.messages import unpack_tensors
from fl_perpcs.phases import Phase, Phases, Setting
from strategies.sharing import pool_of


def per_pcs(setting: Setting) -> Phases:
    """Sharers' pieces go into a pool; each target assembles its adapter from it.

    The server admits and hands on, it averages nothing. The run folder gets ``pool/`` and
    ``recipes.json``. How a target assembles is the config's ``assembly``, ``rerank`` and
    ``mixing``; their defaults are the published method. How it gets at the pieces is ``exchange``.
    """
    # The pool itself is not kept: the offer holds its pieces.
    offer = offered((yield from pool_of(setting)))
    if setting.config.assembly.scorer != "published":
        offer = replace(offer, population=(yield from population_of(setting)))
    yield from find_protocol(setting.config)(setting, offer)


def population_of(setting: Setting) -> Generator[Phase, None, dict[str, torch.Tensor]]:
    """Return what users at large ask of each site: the mean query of the base users' histories.

    Without base users the candidates are asked.
    """
    users = setting.roles.base or setting.roles.candidates
    sums: dict[str, torch.Tensor] = {}

    def add(user: str, reply: Message) -> None:
        for site, query in (unpack_tensors(reply, "arrays") or {}).items():
            sums[site] = sums.get(site, torch.zeros(())) + query

    yield Phase("population", "query.site_queries", users, add)
    return {site: total / len(users) for site, total in sums.items()}
