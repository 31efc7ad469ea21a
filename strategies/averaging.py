"""What the strategies that average sharers' adapters have in common."""

from collections.abc import Generator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fl_perpcs.lm import initial_adapter
from fl_perpcs.messages import pack_adapter, pack_factors
from fl_perpcs.phases import Phase, Rounds, Setting, evaluation
from fl_perpcs.pieces import Adapter
from strategies.sharing import sharers_of

EVERYBODY: dict[str, Any] = {
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_available_nodes": 1,
}
"""Options of Flower's averaging strategies: every sharer trains in every round, however few."""


def start_adapter(setting: Setting) -> Adapter:
    """Return the adapter that everybody starts from."""
    return initial_adapter(setting.spec.shapes, setting.spec.rank, setting.config.seed)


def averaged(
    setting: Setting, strategy: FedAvg, *, trains: str, shares: str
) -> Generator[Phase | Rounds, None, ArrayRecord]:
    """Let sharers train for ``averaging.rounds`` rounds and return the arrays at the end.

    Parameters
    ----------
    setting : Setting
    strategy : FedAvg
        What becomes of the sharers' replies; they are weighted by history items.
    trains, shares : str
        Which of the factors, "A", "B" or "AB", are trained, and which of them are sent.
    """
    ends: list[ArrayRecord] = []
    sharers = yield from sharers_of(setting)
    yield Rounds(
        "average",
        "average",
        strategy,
        sharers,
        pack_factors(start_adapter(setting), shares),
        setting.config.averaging.rounds,
        ConfigRecord({"trains": trains, "shares": shares}),
        ends.append,
    )
    return ends[0]


def given(setting: Setting, method: str, adapter: Adapter, trains: str = "") -> Phase:
    """Return the phase in which targets use one adapter, some factors fine-tuned first."""
    packed, tune = pack_adapter(adapter), ConfigRecord({"trains": trains})
    return evaluation(
        setting,
        method,
        lambda user: RecordDict({"adapter": packed, "tune": tune}),
        action="given",
    )
