"""Broadcast: the whole pool goes to each target, which chooses at home.

The server learns nothing but who is there. With ``exchange.cache`` a target that has seen an
earlier version of the pool tells what it lacks, and is sent that alone; the server then learns
what it has seen before.
"""

import hashlib

import torch
from flwr.app import Message, RecordDict

from fl_perpcs.exchange.offer import METHOD, Offer, with_recipes
from fl_perpcs.messages import pack_tensors
from fl_perpcs.phases import Phase, Phases, Setting
from fl_perpcs.pool import Stack


def broadcast(setting: Setting, offer: Offer) -> Phases:
    """Send everything, or what a target's cache lacks."""
    how, sites = setting.config.exchange.format, tuple(setting.spec.shapes)
    if not setting.config.exchange.cache:
        everything = offer.pack(how)
        yield from with_recipes(
            setting, offer, METHOD, lambda user: RecordDict({**everything}), "assembled"
        )
        return
    lacking: dict[str, dict[str, tuple[str, ...]]] = {}

    def collect(user: str, reply: Message) -> None:
        lacking[user] = offer.request_of(user, reply, sites)

    digests = pack_tensors(piece_digests(offer.stacks))
    yield Phase(
        "compare the pool",
        "query.lacking",
        setting.roles.targets,
        collect,
        lambda user: RecordDict({"digests": digests}),
    )
    population = {} if offer.population is None else {"population": pack_tensors(offer.population)}

    def content(user: str) -> RecordDict:
        return RecordDict({**offer.pack_asked(lacking[user], how, gates=True), **population})

    yield from with_recipes(setting, offer, METHOD, content, "assembled")


def piece_digests(stacks: dict[str, Stack]) -> dict[str, torch.Tensor]:
    """Return by site whose each piece is and a digest of its bytes, (n, 16).

    Named ``<site>.sharers`` and ``<site>.digests``.
    """
    tensors = {}
    for site, stack in stacks.items():
        tensors[f"{site}.sharers"] = torch.tensor([int(sharer) for sharer in stack.sharers])
        tensors[f"{site}.digests"] = torch.tensor(
            [
                list(_digest(A, B, gate))
                for A, B, gate in zip(stack.A, stack.B, stack.gates, strict=True)
            ],
            dtype=torch.uint8,
        )
    return tensors


def _digest(*tensors: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.digest()[:16]
