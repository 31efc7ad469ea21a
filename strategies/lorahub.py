"""Gradient-free weights of whole adapters (Huang et al., "LoraHub", COLM 2024)."""

from flwr.app import RecordDict

from fl_perpcs.exchange import offered, with_recipes
from fl_perpcs.phases import Phases, Setting
from strategies.sharing import pool_of


def lorahub(setting: Setting) -> Phases:
    """Each target searches for weights of the pool's adapters on a few of its history items.

    The run folder gets ``pool/`` and ``recipes.json``.
    """
    offer = offered((yield from pool_of(setting)))
    content = offer.pack(setting.config.exchange.format, gates=False)
    yield from with_recipes(
        setting, offer, "lorahub", lambda user: RecordDict({**content}), "lorahub"
    )
