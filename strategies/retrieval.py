"""Whole-adapter retrieval: the adapter of the sharer whose history is most similar."""

from flwr.app import Message, RecordDict

from fl_perpcs.assembly import Recipe
from fl_perpcs.messages import pack_pool, pack_tensors, recipe_of
from fl_perpcs.phases import Phases, Setting, evaluation
from strategies.sharing import embeddings_of, pool_of


def retrieval(setting: Setting) -> Phases:
    """Sharers give pool and history embeddings; each target takes the nearest one's adapter.

    The target compares on its own side, with an embedding that never leaves it. The run folder
    gets ``pool/`` and ``recipes.json``.
    """
    pool = yield from pool_of(setting)
    embeddings = yield from embeddings_of(tuple(sorted(pool.pieces)))
    content = dict(pack_pool(pool.stacks(), pool.fingerprint))
    content["embeddings"] = pack_tensors(embeddings)
    recipes: dict[str, Recipe] = {}

    def keep(user: str, reply: Message) -> None:
        recipes[user] = recipe_of(reply)

    yield evaluation(
        setting, "retrieval", lambda user: RecordDict({**content}), keep, action="retrieved"
    )
    setting.run.write_json("recipes.json", recipes)
