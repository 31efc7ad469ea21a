"""Gates: one vector per site that learns which inputs a frozen piece is for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fl_perpcs.config import FitSection
from fl_perpcs.lm import LM, SLOT, shapes_of
from fl_perpcs.pieces import Gates
from fl_perpcs.text import Encoded
from fl_perpcs.training import fit


@contextmanager
def gated(lm: LM, gates: Gates) -> Iterator[None]:
    """Put gates before the adapter in the slot: y = Wx + (α/r)·B·A·(σ(x·g)·x).

    Parameters
    ----------
    lm : LM
    gates : Gates
        On the model's device; gradients reach them if they require any.

    References
    ----------
    Tan, Liu and Jiang, "Personalized Pieces", EMNLP 2024, section 3.2.
    """
    hooks = [
        # The input of the slot's dropout is x itself, and only the adapter's path goes by it.
        layer.lora_dropout[SLOT].register_forward_pre_hook(_gate_input(gates[site]))
        for site, layer in lm.sites.items()
        if site in gates
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def train_gates(
    lm: LM,
    encoded: Sequence[Encoded],
    settings: FitSection,
    *,
    seed: int,
    fit_by: Callable[..., list[float]] = fit,
) -> tuple[Gates, list[float]]:
    """Train the gates of the adapter in the slot, which stays frozen.

    Parameters
    ----------
    lm : LM
    encoded : sequence of Encoded
        The sharer's history.
    settings : FitSection
    seed : int
    fit_by : callable
        :func:`fl_perpcs.training.fit`, or something with its signature.

    Returns
    -------
    gates : Gates
        Float32 on the CPU; g = 0 at the start, where σ = ½ for every input.
    losses : list of float
        Of each step.
    """
    gates = {
        site: torch.nn.Parameter(torch.zeros(d_in, device=lm.device))
        for site, (d_in, _) in shapes_of(lm).items()
    }
    with gated(lm, dict(gates)):
        losses = fit_by(
            lm.model,
            list(gates.values()),
            encoded,
            settings,
            pad=lm.pad,
            seed=seed,
        )
    return {site: gate.detach().cpu() for site, gate in gates.items()}, losses


def _gate_input(gate: Tensor):  # type: ignore[no-untyped-def]  # torch's own hook type is private
    def hook(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        return (torch.sigmoid(x @ gate.to(x.dtype)).unsqueeze(-1) * x,)

    return hook
