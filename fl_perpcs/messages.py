"""What travels between server and clients, as Flower records.

Every message to a user carries an *envelope* (who, which phase, which source); the reply's is
written by the server, which knows whom it asked.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_perpcs.assembly import Recipe
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import source_digest
from fl_perpcs.pieces import Adapter, Factors, Piece, name_tensors, pieces_of
from fl_perpcs.pool import Stack, check_base

ENVELOPE = "envelope"
WORKER = "worker"
"""Key of what a reply says of the process that made it: not a result, and never the same twice."""
ADAPTATION = "adaptation"
"""Key of the task adapter that clients merge into their base LLM first."""


def envelope(user: str, phase: str) -> ConfigRecord:
    """Return the envelope of a message to a user."""
    return ConfigRecord({"user": user, "phase": phase, "source": source_digest()})


def open_envelope(message: Message) -> tuple[str, str]:
    """Return the user and the phase of a message, after a look at the sender's source.

    Raises
    ------
    PerPcsError
        If the message has no envelope, or the server runs other code than this client.
    """
    record = message.content.config_records.get(ENVELOPE)
    if record is None:
        raise PerPcsError("the message has no envelope; expected one from fl_perpcs.grid.UserGrid")
    if record["source"] != source_digest():
        raise PerPcsError(
            f"this client's source is {source_digest()}, the server's is {record['source']!s}:"
            " the worker imports another copy of fl_perpcs than the server. Stop the running"
            " SuperLink and start it from a neutral folder, or use `perpcs run`, which does"
        )
    return str(record["user"]), str(record["phase"])


def sender(reply: Message) -> str:
    """Return the user that a reply is from, as stamped by the server."""
    return str(cast(ConfigRecord, reply.content[ENVELOPE])["user"])


def answer(
    message: Message,
    *,
    metrics: Mapping[str, int | float] | None = None,
    arrays: ArrayRecord | None = None,
    info: Mapping[str, Any] | None = None,
    worker: Mapping[str, int | float] | None = None,
) -> Message:
    """Reply with at most one record of each kind: ``metrics``, ``arrays`` and ``info`` (JSON)."""
    content = RecordDict()
    if metrics is not None:
        content["metrics"] = MetricRecord(dict(metrics))
    if arrays is not None:
        content["arrays"] = arrays
    if info is not None:
        content["info"] = ConfigRecord({"json": json.dumps(info)})
    if worker is not None:
        content[WORKER] = ConfigRecord(dict(worker))
    return Message(content, reply_to=message)


def numbers_of(message: Message, key: str) -> dict[str, Any]:
    """Return what a record such as ``metrics`` or ``worker`` holds, {} without one."""
    return dict(message.content.get(key, {}))


def info_of(reply: Message) -> dict[str, Any]:
    """Return a reply's ``info``."""
    return dict(json.loads(cast(ConfigRecord, reply.content["info"])["json"]))  # type: ignore[arg-type]


def arrays_of(message: Message, key: str = "arrays") -> ArrayRecord:
    """Return the arrays of a message.

    Raises
    ------
    PerPcsError
        If it has none under that key.
    """
    record = message.content.array_records.get(key)
    if record is None:
        raise PerPcsError(f"the message has no arrays {key!r}, only {list(message.content)}")
    return record


def pack_adapter(adapter: Adapter) -> ArrayRecord:
    """Write an adapter as arrays ``<site>.lora_A`` and ``<site>.lora_B``."""
    return pack_factors(adapter, "AB")


def unpack_adapter(record: ArrayRecord) -> Adapter:
    """Read an adapter back.

    Raises
    ------
    PerPcsError
        If a site lacks a factor.
    """
    tensors = _unpack(record)
    sites = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    try:
        return {s: Factors(tensors[f"{s}.lora_A"], tensors[f"{s}.lora_B"]) for s in sites}
    except KeyError as error:
        raise PerPcsError(f"the adapter lacks {error}") from None


def pack_pieces(pieces: list[Piece]) -> ArrayRecord:
    """Write pieces as arrays, named as by :func:`fl_perpcs.pieces.name_tensors`."""
    return _pack(name_tensors(pieces))


def unpack_pieces(record: ArrayRecord) -> list[Piece]:
    """Read pieces back.

    Raises
    ------
    PerPcsError
        If a piece lacks a factor or its gate.
    """
    return pieces_of(_unpack(record))


def pack_pool(stacks: Mapping[str, Stack], fingerprint: str) -> RecordDict:
    """Write a pool as stacked arrays, with whose each piece is and for which base LLM."""
    arrays = {
        f"{site}.{name}": tensor
        for site, stack in stacks.items()
        for name, tensor in (("lora_A", stack.A), ("lora_B", stack.B), ("gates", stack.gates))
    }
    sharers = {site: list(stack.sharers) for site, stack in stacks.items()}
    about = ConfigRecord({"sharers": json.dumps(sharers), "base": fingerprint})
    return RecordDict({"pool": _pack(arrays), "about-pool": about})


def unpack_pool(message: Message, fingerprint: str) -> dict[str, Stack]:
    """Read a pool back.

    Raises
    ------
    PerPcsError
        If it was made for another base LLM than the one with this fingerprint.
    """
    about = message.content.config_records["about-pool"]
    check_base(fingerprint, str(about["base"]), "the pool")
    tensors = _unpack(arrays_of(message, "pool"))
    sharers = json.loads(str(about["sharers"]))
    return {
        site: Stack(
            tuple(names),
            tensors[f"{site}.lora_A"],
            tensors[f"{site}.lora_B"],
            tensors[f"{site}.gates"],
        )
        for site, names in sharers.items()
    }


def pack_factors(adapter: Adapter, factors: str) -> ArrayRecord:
    """Write only A, only B or both of an adapter: ``factors`` is "A", "B" or "AB"."""
    return _pack(
        {
            f"{site}.lora_{name}": getattr(both, name)
            for site, both in adapter.items()
            for name in factors
        }
    )


def unpack_factors(record: ArrayRecord, start: Adapter) -> Adapter:
    """Read factors back; those that the record lacks are ``start``'s."""
    tensors = _unpack(record)
    return {
        site: Factors(tensors.get(f"{site}.lora_A", A), tensors.get(f"{site}.lora_B", B))
        for site, (A, B) in start.items()
    }


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Write tensors, such as the queries of sites or embeddings of users, by their names."""
    return _pack(tensors)


def unpack_tensors(message: Message, key: str) -> dict[str, torch.Tensor] | None:
    """Read named tensors back; None if the message has none under that key."""
    record = message.content.array_records.get(key)
    return None if record is None else _unpack(record)


def recipe_of(reply: Message) -> Recipe:
    """Return a reply's recipe."""
    return {str(site): dict(weights) for site, weights in info_of(reply)["recipe"].items()}


def _pack(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    # numpy has no bfloat16: everything is sent as float32 for now.
    return ArrayRecord({k: Array(t.detach().float().cpu().numpy()) for k, t in tensors.items()})


def _unpack(record: ArrayRecord) -> dict[str, torch.Tensor]:
    # Copied: an array's buffer is not writable, a tensor's is expected to be.
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
