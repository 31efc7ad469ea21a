"""FedSA-LoRA: A is averaged, each user keeps a B of its own.

References
----------
Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.
"""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fl_perpcs.messages import arrays_of, unpack_factors
from fl_perpcs.phases import Phases, Setting
from strategies.averaging import EVERYBODY, averaged, given, start_adapter


class KeepingFedAvg(FedAvg):
    """FedAvg over what users share; what each keeps goes back to it with the next message.

    It stands for the users' own disks: workers of a simulation remember nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[int, ArrayRecord] = {}
        self.order: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Add what each user kept to Flower's messages."""
        self.order = []
        # Flower's messages share one content, so each gets a new one.
        for message in super().configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            self.order.append(node)  # replies come in the order of the messages
            kept = {"kept": self.kept[node]} if node in self.kept else {}
            content = RecordDict({**message.content, **kept})
            yield Message(content, node, message.metadata.message_type)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put aside what each user keeps; Flower averages the rest."""
        replies = list(replies)
        for node, reply in zip(self.order, replies, strict=True):
            self.kept[node] = arrays_of(reply, "kept")
            del reply.content["kept"]
        return super().aggregate_train(server_round, replies)


def fedsa_lora(setting: Setting) -> Phases:
    """Sharers train A together, each with its own B; a target trains its B on that A, frozen."""
    strategy = KeepingFedAvg(**EVERYBODY)
    arrays = yield from averaged(setting, strategy, trains="AB", shares="A")
    yield given(setting, "fedsa-lora", unpack_factors(arrays, start_adapter(setting)), trains="B")
