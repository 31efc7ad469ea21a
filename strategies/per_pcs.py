"""Personalized Pieces (Tan, Liu and Jiang, EMNLP 2024)."""

from dataclasses import replace

from fl_perpcs.exchange import find_protocol, offered
from fl_perpcs.phases import Phases, Setting
from strategies.sharing import pool_of, population_of


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
