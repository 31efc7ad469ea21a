"""The uniform mean of the pool: one adapter for every target."""

from flwr.app import RecordDict

from fl_perpcs.assembly import cook
from fl_perpcs.messages import pack_adapter
from fl_perpcs.phases import Phases, Setting, evaluation
from strategies.sharing import pool_of


def pool_mean(setting: Setting) -> Phases:
    """Weigh all pieces of a site the same, merge them as ``assembly.merge`` says, and evaluate."""
    pool = yield from pool_of(setting)
    stacks = pool.stacks()
    recipe = {
        site: dict.fromkeys(stack.sharers, 1 / len(stack.sharers)) for site, stack in stacks.items()
    }
    adapter = pack_adapter(cook(recipe, stacks, setting.config.assembly.merge))
    yield evaluation(
        setting, "pool-mean", lambda user: RecordDict({"adapter": adapter}), action="given"
    )
