"""Gradient-free weights of whole adapters (Huang et al., "LoraHub", COLM 2024)."""

from fl_perpcs.messages import pack_pool
from fl_perpcs.phases import Phases, Setting
from strategies.sharing import pool_of, with_recipes


def lorahub(setting: Setting) -> Phases:
    """Each target searches for weights of the pool's adapters on a few of its history items.

    The run folder gets ``pool/`` and ``recipes.json``.
    """
    pool = yield from pool_of(setting)
    content = pack_pool(pool.stacks(), pool.fingerprint)
    yield from with_recipes(setting, "lorahub", content, "lorahub")
