"""FedAvg on LoRA factors, A and B apart (FedIT; Zhang et al., ICASSP 2024)."""

from flwr.serverapp.strategy import FedAvg

from fl_perpcs.messages import unpack_adapter
from fl_perpcs.phases import Phases, Setting
from strategies.averaging import EVERYBODY, averaged, given


def fedavg_lora(setting: Setting) -> Phases:
    """Sharers train one adapter together; every target uses it as it is."""
    arrays = yield from averaged(setting, FedAvg(**EVERYBODY), trains="AB", shares="AB")
    yield given(setting, "fedavg-lora", unpack_adapter(arrays))


def fedavg_lora_tuned(setting: Setting) -> Phases:
    """Train the same; each target fine-tunes it on its own history, as long as OPPU trains."""
    arrays = yield from averaged(setting, FedAvg(**EVERYBODY), trains="AB", shares="AB")
    yield given(setting, "fedavg-lora-tuned", unpack_adapter(arrays), trains="AB")
