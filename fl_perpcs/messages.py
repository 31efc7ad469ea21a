"""What travels between server and clients, as Flower records.

Every message to a user carries an *envelope* (who, which phase, which source); the reply's is
written by the server, which knows whom it asked.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_perpcs.assembly import Recipe, Request
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import source_digest
from fl_perpcs.pieces import Adapter, Factors, Piece, name_factors, name_tensors, pieces_of
from fl_perpcs.pool import Stack, check_base, name_stacks, number_name, stacks_of
from fl_perpcs.references import referred
from fl_perpcs.wire import decode, encode

ENVELOPE = "envelope"
WORKER = "worker"
"""Key of what a reply says of the process that made it: not a result, and never the same twice."""
ADAPTATION = "adaptation"
"""Key of the task adapter that clients merge into their base LLM first."""
POOL = "pool"
"""Key of pieces or gates of the pool."""
REQUEST = "request"
"""Key of a request for pieces."""
REPORT, RECIPE = "report", "recipe"
REPORTS = (REPORT, RECIPE, WORKER, "metrics")
"""Keys of what replies tell the researcher; a real federation would keep it on the node.
(Strategies that average take one number of the metrics, how many examples.)"""


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
    report: Mapping[str, Any] | None = None,
    worker: Mapping[str, int | float] | None = None,
    **records: ArrayRecord,
) -> Message:
    """Reply with at most one record of each kind, and more arrays under keys of their own.

    ``info`` and ``report`` are JSON; what is in ``report`` is for the researcher alone.
    """
    content = RecordDict()
    if metrics is not None:
        content["metrics"] = MetricRecord(dict(metrics))
    if arrays is not None:
        content["arrays"] = arrays
    if info is not None:
        content["info"] = ConfigRecord({"json": json.dumps(info)})
    if report is not None:
        content[REPORT] = ConfigRecord({"json": json.dumps(report)})
    if worker is not None:
        content[WORKER] = ConfigRecord(dict(worker))
    for key, record in records.items():
        content[key] = record
    return Message(content, reply_to=message)


def numbers_of(message: Message, key: str) -> dict[str, Any]:
    """Return what a record such as ``metrics`` or ``worker`` holds, {} without one."""
    return dict(message.content.get(key, {}))


def info_of(reply: Message, key: str = "info") -> dict[str, Any]:
    """Return a reply's ``info`` or ``report``."""
    return dict(json.loads(cast(ConfigRecord, reply.content[key])["json"]))  # type: ignore[arg-type]


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


def pack_adapter(adapter: Adapter, how: str = "float32") -> ArrayRecord:
    """Write an adapter as arrays ``<site>.lora_A`` and ``<site>.lora_B``."""
    return _pack(name_factors(adapter), how)


def unpack_adapter(record: ArrayRecord) -> Adapter:
    """Read an adapter back.

    Raises
    ------
    PerPcsError
        If a site lacks a factor.
    """
    return adapter_of(_unpack(record))


def adapter_of(tensors: Mapping[str, torch.Tensor]) -> Adapter:
    """Return an adapter from tensors ``<site>.lora_A`` and ``<site>.lora_B``.

    Raises
    ------
    PerPcsError
        If a site lacks a factor.
    """
    sites = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    try:
        return {s: Factors(tensors[f"{s}.lora_A"], tensors[f"{s}.lora_B"]) for s in sites}
    except KeyError as error:
        raise PerPcsError(f"the adapter lacks {error}") from None


def pack_pieces(pieces: list[Piece], how: str = "float32") -> ArrayRecord:
    """Write pieces as arrays, named as by :func:`fl_perpcs.pieces.name_tensors`."""
    return _pack(name_tensors(pieces), how)


def unpack_pieces(record: ArrayRecord) -> list[Piece]:
    """Read pieces back.

    Raises
    ------
    PerPcsError
        If a piece lacks a factor or its gate.
    """
    return pieces_of(_unpack(record))


def pack_pool(
    stacks: Mapping[str, Stack],
    fingerprint: str,
    how: str = "float32",
    *,
    gates: bool = True,
    factors: bool = True,
) -> RecordDict:
    """Write a pool, its gates or its factors as stacked arrays, and for which base LLM they are.

    Whose each piece is goes along as a number: the sharer's place in the pool.

    Parameters
    ----------
    stacks : mapping of str to Stack
        Their sharers are numbers already, see :func:`fl_perpcs.pool.numbered`.
    fingerprint : str
    how : str
        The wire format.
    gates, factors : bool
        What to write of each piece.
    """
    tensors = name_stacks(stacks, gates=gates, factors=factors)
    return RecordDict(
        {POOL: _pack(tensors, how), "about-pool": ConfigRecord({"base": fingerprint})}
    )


def unpack_pool(message: Message, fingerprint: str) -> dict[str, Stack]:
    """Read a pool back, or what there is of it; sharers are numbers.

    Raises
    ------
    PerPcsError
        If it was made for another base LLM than the one with this fingerprint.
    """
    about = message.content.config_records["about-pool"]
    check_base(fingerprint, str(about["base"]), "the pool")
    return stacks_of(tensors_of(message, POOL))


def pack_request(request: Request, sites: Sequence[str]) -> ArrayRecord:
    """Write which pieces are asked for: how many at each site, and whose."""
    numbers = [int(sharer) for site in sites for sharer in request.get(site, ())]
    counts = [len(request.get(site, ())) for site in sites]
    return _pack({"counts": torch.tensor(counts), "sharers": torch.tensor(numbers).long()})


def unpack_request(message: Message, sites: Sequence[str]) -> Request:
    """Read a request back; sites of which nothing is asked are left out."""
    names, counts = _sparse(tensors_of(message, REQUEST), sites)
    return {site: tuple(next(names) for _ in range(count)) for site, count in counts if count}


def _sparse(
    tensors: Mapping[str, torch.Tensor], sites: Sequence[str]
) -> tuple[Iterator[str], list[tuple[str, int]]]:
    """Return the sharers of all sites in a row, and how many are each site's.

    Raises
    ------
    PerPcsError
        If they do not add up.
    """
    counts = tensors.get("counts", torch.empty(0)).tolist()
    numbers = tensors.get("sharers", torch.empty(0)).tolist()
    weights = len(tensors["weights"]) if "weights" in tensors else len(numbers)
    if len(counts) != len(sites) or sum(counts) != len(numbers) or weights != len(numbers):
        raise PerPcsError(
            f"a request or recipe names {len(numbers)} sharers for {len(counts)} sites,"
            f" expected {sum(counts)} for {len(sites)}"
        )
    names = iter([number_name(int(number)) for number in numbers])
    return names, [(site, int(count)) for site, count in zip(sites, counts, strict=True)]


def pack_recipe(recipe: Recipe, sites: Sequence[str]) -> ArrayRecord:
    """Write a recipe's weights and whose piece each is for, 4 bytes each."""
    weights = [weight for site in sites for weight in recipe.get(site, {}).values()]
    record = pack_request({site: tuple(found) for site, found in recipe.items()}, sites)
    return ArrayRecord({**record, **_pack({"weights": torch.tensor(weights).float()})})


def unpack_recipe(message: Message, sites: Sequence[str]) -> Recipe:
    """Read a recipe back, with sharers as numbers."""
    tensors = tensors_of(message, RECIPE)
    names, counts = _sparse(tensors, sites)
    weights = iter(tensors["weights"].tolist())
    return {
        site: {next(names): next(weights) for _ in range(count)} for site, count in counts if count
    }


def pack_factors(adapter: Adapter, factors: str) -> ArrayRecord:
    """Write only A, only B or both of an adapter: ``factors`` is "A", "B" or "AB"."""
    return _pack(name_factors(adapter, factors))


def unpack_factors(record: ArrayRecord, start: Adapter) -> Adapter:
    """Read factors back; those that the record lacks are ``start``'s."""
    return fill_factors(_unpack(record), start)


def fill_factors(tensors: Mapping[str, torch.Tensor], start: Adapter) -> Adapter:
    """Return an adapter with the factors among the tensors in place of ``start``'s."""
    return {
        site: Factors(tensors.get(f"{site}.lora_A", A), tensors.get(f"{site}.lora_B", B))
        for site, (A, B) in start.items()
    }


def pack_tensors(tensors: Mapping[str, torch.Tensor], how: str = "float32") -> ArrayRecord:
    """Write tensors, such as the queries of sites or embeddings of users, by their names."""
    return _pack(tensors, how)


def tensors_of(message: Message, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a message, sent along or by reference.

    Raises
    ------
    PerPcsError
        If it has none under that key.
    """
    # Only the pool is ever sent by reference, and only to clients: a reply cannot name a file.
    if key == POOL and key in message.content.config_records:
        return decode(referred(message.content.config_records[key]))
    return _unpack(arrays_of(message, key))


def unpack_tensors(message: Message, key: str) -> dict[str, torch.Tensor] | None:
    """Read named tensors back; None if the message has none under that key."""
    return tensors_of(message, key) if key in message.content else None


def _pack(tensors: Mapping[str, torch.Tensor], how: str = "float32") -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in encode(tensors, how).items()})


def _unpack(record: ArrayRecord) -> dict[str, torch.Tensor]:
    return decode({name: array.numpy() for name, array in record.items()})
