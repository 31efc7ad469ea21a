"""Gradient-free weights of whole adapters (Huang et al., "LoraHub", COLM 2024)."""

from flwr.app import Message, RecordDict

from fl_perpcs.assembly import Recipe
from fl_perpcs.messages import pack_pool, recipe_of
from fl_perpcs.phases import Phases, Setting, evaluation
from strategies.sharing import pool_of


def lorahub(setting: Setting) -> Phases:
    """Each target searches for weights of the pool's adapters on a few of its history items.

    The run folder gets ``pool/`` and ``recipes.json``.
    """
    pool = yield from pool_of(setting)
    content = pack_pool(pool.stacks(), pool.fingerprint)
    recipes: dict[str, Recipe] = {}

    def keep(user: str, reply: Message) -> None:
        recipes[user] = recipe_of(reply)

    yield evaluation(setting, "lorahub", lambda user: RecordDict({**content}), keep)
    setting.run.write_json("recipes.json", recipes)
