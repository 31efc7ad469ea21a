"""A front on disk: how far a target's batches have come, between two messages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_perpcs.assembly.stages import Front
from fl_perpcs.disk import Drawer
from fl_perpcs.pieces import Factors

NAME = "front"


def save_front(drawer: Drawer, front: Front, **facts: Any) -> None:
    """Keep a front, and facts that are JSON."""
    tensors = {f"input {number}": x for number, x in enumerate(front.inputs)}
    for number, adapter in enumerate(front.factors):
        for site, both in adapter.items():
            tensors |= {f"A {number} {site}": both.A, f"B {number} {site}": both.B}
    drawer.put(NAME, tensors, {"layer": front.layer, "asked": front.asked, **facts})


def load_front(drawer: Drawer) -> tuple[Front, dict[str, Any]]:
    """Return a front, and the facts that were kept with it.

    Raises
    ------
    PerPcsError
        If none was kept.
    """
    tensors, facts = drawer.take(NAME)
    inputs = _in_order(tensors)
    front = Front(facts["layer"], inputs, facts["asked"], [{} for _ in inputs])
    for key in tensors:
        if key.startswith("A "):
            _, number, site = key.split(" ")
            both = Factors(tensors[key], tensors[f"B {number} {site}"])
            front.factors[int(number)][site] = both
    return front, facts


def _in_order(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    count = sum(key.startswith("input ") for key in tensors)
    return [tensors[f"input {number}"] for number in range(count)]
