"""FLoRA: adapters are stacked along the rank, which sums their updates without error.

References
----------
Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024.
"""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fl_perpcs.messages import ADAPTATION, arrays_of, numbers_of, pack_adapter, unpack_adapter
from fl_perpcs.phases import Phases, Setting
from fl_perpcs.pieces import Adapter, Factors, stack
from strategies.averaging import EVERYBODY, averaged, given


class Stacking(FedAvg):
    """Flower's FedAvg with stacking in place of the mean.

    Each round's stack is merged into the base LLM that the next round trains on, from a new
    start; the arrays of the result are all rounds' stacks together.
    """

    def __init__(self, adaptation: Adapter, **options: Any) -> None:
        super().__init__(**options)
        self.adaptation = adaptation
        self.total: Adapter = {}
        self.start_arrays = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the common start, and what the base LLM has become."""
        self.start_arrays = arrays if server_round == 1 else self.start_arrays
        base = pack_adapter(stack(self.adaptation, self.total))
        for message in super().configure_train(server_round, self.start_arrays, config, grid):
            content = RecordDict({**message.content, **({ADAPTATION: base} if base else {})})
            metadata = message.metadata
            yield Message(content, metadata.dst_node_id, metadata.message_type)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Stack the users' adapters, each weighted by its share of the examples."""
        found = [
            (float(numbers_of(r, "metrics")["num-examples"]), unpack_adapter(arrays_of(r)))
            for r in replies
        ]
        self.total = stack(self.total, stacked(found))
        return pack_adapter(self.total), MetricRecord()


def stacked(adapters: Iterable[tuple[float, Adapter]]) -> Adapter:
    """Return the adapter whose update is the weighted mean of the updates, exactly."""
    adapters = list(adapters)
    whole = sum(weight for weight, _ in adapters)
    total: Adapter = {}
    for weight, adapter in adapters:
        part = {site: Factors(A, B * (weight / whole)) for site, (A, B) in adapter.items()}
        total = stack(total, part)
    return total


def flora(setting: Setting) -> Phases:
    """Sharers train adapters whose updates are summed round by round; every target uses the sum."""
    strategy = Stacking(setting.adaptation, **EVERYBODY)
    arrays = yield from averaged(setting, strategy, trains="AB", shares="AB")
    yield given(setting, "flora", unpack_adapter(arrays))
