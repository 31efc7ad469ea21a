"""FedSA-LoRA: A is averaged, each user keeps a B of its own.

References
----------
Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.
"""

from flwr.serverapp.strategy import FedAvg

from fl_perpcs.messages import unpack_factors
from fl_perpcs.phases import Phases, Setting
from strategies.averaging import EVERYBODY, averaged, given, start_adapter


def fedsa_lora(setting: Setting) -> Phases:
    """Sharers train A together, each with its own B; a target trains its B on that A, frozen."""
    strategy = FedAvg(**EVERYBODY)
    arrays = yield from averaged(setting, strategy, trains="AB", shares="A")
    yield given(setting, "fedsa-lora", unpack_factors(arrays, start_adapter(setting)), trains="B")
