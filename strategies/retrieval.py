"""Whole-adapter retrieval: the adapter of the sharer whose history is most similar."""

from flwr.app import ConfigRecord, Message, RecordDict

from fl_perpcs.assembly import cook, recipe_bytes, whole
from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import info_of, pack_adapter, pack_tensors
from fl_perpcs.phases import Phase, Phases, Setting, evaluation
from strategies.sharing import embeddings_of, pool_of


def retrieval(setting: Setting) -> Phases:
    """Sharers give pool and history embeddings; each target takes the nearest one's adapter.

    The target compares on its own side, with an embedding that never leaves it, and asks for one
    adapter. The run folder gets ``pool/`` and ``recipes.json``.
    """
    pool = yield from pool_of(setting)
    sharers = tuple(sorted(pool.pieces))
    embeddings = yield from embeddings_of(sharers)
    # Sharers are numbers to targets.
    packed = pack_tensors({str(n): embeddings[sharer] for n, sharer in enumerate(sharers)})
    nearest: dict[str, str] = {}

    def collect(user: str, reply: Message) -> None:
        number = str(info_of(reply)["sharer"])
        if not number.isdecimal() or int(number) >= len(sharers):
            raise PerPcsError(f"user {user!r} asks for sharer number {number!r} of {len(sharers)}")
        nearest[user] = sharers[int(number)]

    targets = setting.roles.targets
    yield Phase(
        "find the nearest",
        "query.nearest",
        targets,
        collect,
        lambda user: RecordDict({"embeddings": packed}),
    )
    stacks = pool.stacks()
    recipes = {user: whole({sharer: 1.0}, stacks) for user, sharer in nearest.items()}

    def content(user: str) -> RecordDict:
        adapter = cook(recipes[user], stacks, setting.config.assembly.merge)
        stored = ConfigRecord({"stored": recipe_bytes(recipes[user])})
        return RecordDict({"adapter": pack_adapter(adapter), "tune": stored})

    yield evaluation(setting, "retrieval", content, action="given")
    setting.run.write_json("recipes.json", recipes)
