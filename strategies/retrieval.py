"""Whole-adapter retrieval: the adapter of the sharer whose history is most similar."""

from fl_perpcs.messages import pack_pool, pack_tensors
from fl_perpcs.phases import Phases, Setting
from strategies.sharing import embeddings_of, pool_of, with_recipes


def retrieval(setting: Setting) -> Phases:
    """Sharers give pool and history embeddings; each target takes the nearest one's adapter.

    The target compares on its own side, with an embedding that never leaves it. The run folder
    gets ``pool/`` and ``recipes.json``.
    """
    pool = yield from pool_of(setting)
    embeddings = yield from embeddings_of(tuple(sorted(pool.pieces)))
    content = dict(pack_pool(pool.stacks(), pool.fingerprint))
    content["embeddings"] = pack_tensors(embeddings)
    yield from with_recipes(setting, "retrieval", content, "retrieved")
