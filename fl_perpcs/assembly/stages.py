"""The forward passes of assembly, in stages: every batch stops where pieces are wanted.

A target that has not got the pool runs all batches of its history up to the next sites, asks for
what it chose there, and goes on from the input of that decoder layer. Sites that read the same
tensor (q, k and v of a layer) are one stage. What each batch computes is, bit for bit, what one
uninterrupted pass computes; a layer is entered once for each of its stages.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from fl_perpcs.assembly.passes import Queries, forward, watching
from fl_perpcs.assembly.scoring import example_queries
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import LM, put_adapter
from fl_perpcs.pieces import Adapter
from fl_perpcs.text import Batch


@dataclass
class Front:
    """How far the batches of a history have come, all of them to the same decoder layer.

    Attributes
    ----------
    layer : int
    inputs : list of Tensor
        What enters that layer, (examples, tokens, hidden size), by batch; empty at the start.
    asked : list of str
        The sites that have been asked about.
    factors : list of Adapter
        What was put in place at those of this layer, by batch.
    """

    layer: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    factors: list[Adapter] = field(default_factory=list)


class _StopError(Exception):
    """The forward pass has come to a site that depends on pieces which are not there yet."""


def ask(
    lm: LM, batches: Sequence[Batch], sites: Collection[str], front: Front
) -> tuple[Queries, Front]:
    """Go on to the next sites.

    Parameters
    ----------
    lm : LM
    batches : sequence of Batch
    sites : collection of str
        Where there are pieces; the others get no update.
    front : Front
        With factors for all sites asked so far in its layer.

    Returns
    -------
    queries : dict of str to Tensor
        Of the next sites, a row for each batch: (batches, d_in).
    front : Front
        Where they are, to go on from.
    """
    layers = _layers(lm)
    if not front.asked:
        # Stopped passes are not counted by themselves; all stages together are one pass.
        lm.passes.forward += sum(len(batch.input_ids) for batch in batches)
    found: list[dict[str, Tensor]] = []
    inputs: list[Tensor] = []
    start = front.layer
    for number, batch in enumerate(batches):
        put_adapter(lm, front.factors[number] if front.factors else {})
        saved = front.inputs[number] if front.inputs else None
        with _from_layer(layers, start, saved) as entered:
            found.append(_next_queries(lm, batch, sites, front.asked))
        start_of_found = _layer_of(next(iter(found[-1])))
        inputs.append(entered[start_of_found].detach().cpu())
    queries = {site: torch.stack([f[site] for f in found]) for site in found[0]}
    layer = _layer_of(next(iter(queries)))
    factors = front.factors if layer == start and front.factors else [{} for _ in batches]
    return queries, Front(layer, inputs, [*front.asked, *queries], factors)


def _next_queries(
    lm: LM, batch: Batch, sites: Collection[str], asked: Collection[str]
) -> dict[str, Tensor]:
    """Run one batch until every site that can be asked about now has its query, (d_in,)."""
    predicts_response = batch.predicts_response.to(lm.device)
    found: dict[str, Tensor] = {}
    read: list[Tensor] = []
    wanted = set(sites) - set(asked)

    def visit(site: str, layer: LoraLayer, x: Tensor) -> None:
        if site not in wanted:
            return
        if read and read[0] is not x:
            raise _StopError
        read[:] = [x]
        found[site] = example_queries(x, predicts_response).mean(dim=0)
        if len(found) == len(wanted):
            raise _StopError

    try:
        with watching(lm, visit):
            forward(lm, batch)
    except _StopError:
        pass
    return found


@contextmanager
def _from_layer(
    layers: torch.nn.ModuleList, start: int, hidden: Tensor | None
) -> Iterator[dict[int, Tensor]]:
    """Let the decoder begin at a layer, with what enters it; yields what enters each layer."""
    entered: dict[int, Tensor] = {}

    def enter(number: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if number == start and hidden is not None:
                x = hidden.to(x.device)
                if args:
                    args = (x, *args[1:])
                else:
                    kwargs = {**kwargs, "hidden_states": x}
            entered[number] = x
            return args, kwargs

        return hook

    hooks = [
        layer.register_forward_pre_hook(enter(number), with_kwargs=True)
        for number, layer in enumerate(layers)
        if number >= start
    ]
    skipped = list(layers)[:start]
    for layer in skipped:
        # On the instance: the class's own forward comes back when this is deleted.
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()
        for layer in skipped:
            del layer.forward


def _layers(lm: LM) -> torch.nn.ModuleList:
    """Return the list of decoder layers that the sites are in."""
    site = next(iter(lm.sites))
    parts = site.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        raise PerPcsError(
            f"site {site!r} is in no numbered decoder layer, so assembly cannot stop there;"
            ' set exchange.protocol to "broadcast" or "one-shot"'
        )
    found = lm.model.get_base_model().get_submodule(".".join(parts[:number]))
    return cast(torch.nn.ModuleList, found)


def _layer_of(site: str) -> int:
    return next(int(part) for part in site.split(".") if part.isdigit())
