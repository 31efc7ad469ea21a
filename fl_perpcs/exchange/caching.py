"""A target that has seen an earlier version of the pool: it asks for what has changed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_perpcs.disk import Drawer
from fl_perpcs.exchange.asking import Asking
from fl_perpcs.node import Job, exchange_drawer
from fl_perpcs.pool import Stack, stacks_of


def lacking(job: Job, run: int, digests: Mapping[str, Tensor]) -> Asking:
    """Ask for the pieces of a pool that the cache lacks.

    Parameters
    ----------
    digests : mapping of str to Tensor
        As :func:`fl_perpcs.exchange.broadcast.piece_digests` has them.
    """
    drawer = _cache(job)
    # Of this run alone: another may offer another pool in the meantime.
    exchange_drawer(job, run).put("offer", dict(digests))
    known = set(drawer.take("pieces")[1]) if drawer.has("pieces") else set()
    request = {
        site: tuple(sharer for sharer, digest in found if f"{site} {digest}" not in known)
        for site, found in _digests(digests).items()
    }
    return Asking({site: wanted for site, wanted in request.items() if wanted}, more=False)


def completed(job: Job, run: int, pieces: Mapping[str, Stack]) -> dict[str, Stack]:
    """Return the whole pool that was offered, from what came and the cache, and cache it."""
    drawer = _cache(job)
    held: dict[str, Tensor] = drawer.take("pieces")[0] if drawer.has("pieces") else {}
    offered = exchange_drawer(job, run)
    offer = _digests(offered.take("offer")[0])
    offered.clear()
    # What was sent is known by the sender's digests, whatever the wire format did to it.
    for site, stack in pieces.items():
        digest_of = dict(offer[site])
        for i, sharer in enumerate(stack.sharers):
            for part in ("A", "B", "gates"):
                held[f"{site} {digest_of[sharer]} {part}"] = getattr(stack, part)[i]
    stacks = {}
    for site, found in offer.items():
        A, B, gates = (
            torch.stack([held[f"{site} {digest} {part}"] for _, digest in found])
            for part in ("A", "B", "gates")
        )
        stacks[site] = Stack(tuple(sharer for sharer, _ in found), A, B, gates)
    wanted = [f"{site} {digest}" for site, found in offer.items() for _, digest in found]
    parts = {f"{key} {part}" for key in wanted for part in ("A", "B", "gates")}
    drawer.put("pieces", {key: held[key] for key in sorted(parts)}, sorted(set(wanted)))
    return stacks


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, str]]]:
    """Return by site (sharer, digest) of each piece."""
    return {
        site: [
            (sharer, bytes(digest).hex())
            for sharer, digest in zip(
                stack.sharers, tensors[f"{site}.digests"].tolist(), strict=True
            )
        ]
        for site, stack in stacks_of(tensors).items()
    }


def _cache(job: Job) -> Drawer:
    # Decoded pieces differ by format.
    return Drawer("cache", job.user.id, job.config.exchange.format)
