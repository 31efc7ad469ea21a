"""FFA-LoRA: A is frozen, B averaged, so that the mean of updates is the update of the mean.

References
----------
Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
"""

from flwr.serverapp.strategy import FedAvg

from fl_perpcs.messages import unpack_factors
from fl_perpcs.phases import Phases, Setting
from strategies.averaging import EVERYBODY, averaged, given, start_adapter


def ffa_lora(setting: Setting) -> Phases:
    """Sharers train B alone, on the common A; every target uses the mean."""
    arrays = yield from averaged(setting, FedAvg(**EVERYBODY), trains="B", shares="B")
    yield given(setting, "ffa-lora", unpack_factors(arrays, start_adapter(setting)))
