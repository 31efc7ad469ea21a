"""The ledger: bytes of every message, by phase, user and direction.

:class:`MeteredGrid` wraps Flower's grid, under all strategies and handlers. It counts a message
as Flower's network serializes it: a tree of objects (message, records, arrays, chunks of data),
each with a header, equal objects of one message once.
"""

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.run import Run as FlowerRun

from fl_perpcs.messages import ENVELOPE, REPORTS
from fl_perpcs.references import References

FILE = "ledger.parquet"
DOWN, UP = "down", "up"
BYTES = ("arrays", "metadata", "report", "wire")
"""The columns of bytes: what arrays hold (with NumPy's header of each), other records, what is
only reported to the researcher, and all of it as serialized, with Flower's framing."""
NO_PHASE = "hello"
"""The phase of messages to nodes, which concern no user."""


@dataclass(frozen=True)
class Entry:
    """One message, sent or received: who, in which phase, and its bytes.

    A message that is sent again and a reply that comes twice are entries of their own.
    """

    phase: str
    user: str
    message: str
    direction: str
    arrays: int
    metadata: int
    report: int
    wire: int
    error: bool = False


@dataclass
class Ledger:
    """The messages of a run."""

    entries: list[Entry] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write ``ledger.parquet`` into a run folder, whole or not at all.

        Phases in their order, then by user, whoever was faster.
        """
        phases = {entry.phase: n for n, entry in reversed(list(enumerate(self.entries)))}
        ordered = sorted(self.entries, key=lambda e: (phases[e.phase], e.user, e.direction))
        table = pa.Table.from_pylist([vars(entry) for entry in ordered], schema=_SCHEMA)
        temporary = folder / f".{FILE}.{os.getpid()}"
        pq.write_table(table, temporary)
        temporary.replace(folder / FILE)


_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("phase", "user", "message", "direction")]
    + [(name, pa.int64()) for name in BYTES]
    + [("error", pa.bool_())]
)


def read_ledger(folder: Path) -> list[Entry]:
    """Return the entries of a run folder's ledger."""
    return [Entry(**row) for row in pq.read_table(folder / FILE).to_pylist()]


@dataclass
class MeteredGrid(Grid):
    """Flower's grid, with every message that passes entered into a ledger.

    Attributes
    ----------
    inner : Grid
    ledger : Ledger
    references : References, optional
        Large records that go out more than once are put into files, and messages name the file:
        for simulations on one machine. The ledger counts what would have been sent.
    """

    inner: Grid
    ledger: Ledger
    references: References | None = None
    _asked: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    _sizes: "_Sizes" = field(default_factory=lambda: _Sizes())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, enter them, and return their ids."""
        messages = list(messages)
        entries = [self._sent(message) for message in messages]
        sent = messages if self.references is None else [*map(self.references.put, messages)]
        ids = list(self.inner.push_messages(sent))
        for identity, entry in zip(ids, entries, strict=False):
            # Flower has None where it took no message.
            if identity:
                self._enter(identity, entry)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Fetch replies, and enter them."""
        return self._received(self.inner.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages to nodes and return their replies; both are entered."""
        messages = list(messages)
        entries = [self._sent(message) for message in messages]
        replies = list(self.inner.send_and_receive(messages, timeout=timeout))
        for message, entry in zip(messages, entries, strict=True):
            self._enter(message.metadata.message_id, entry)
        return self._received(replies)

    def get_node_ids(self) -> list[int]:
        """Pass on to Flower's grid."""
        return list(self.inner.get_node_ids())

    def set_run(self, run: FlowerRun) -> None:
        """Pass on to Flower's grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> FlowerRun:
        """The Flower run."""
        return self.inner.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message; deprecated in Flower."""
        return self.inner.create_message(*args, **kwargs)

    def _sent(self, message: Message) -> Entry:
        return Entry(*_about(message), DOWN, *self._sizes.of(message))

    def _enter(self, identity: str, entry: Entry) -> None:
        self.ledger.entries.append(entry)
        self._asked[identity] = (entry.phase, entry.user, entry.message)

    def _received(self, replies: Iterable[Message]) -> list[Message]:
        replies = list(replies)
        for reply in replies:
            about = self._asked.get(reply.metadata.reply_to_message_id, (NO_PHASE, "", ""))
            sizes = self._sizes.of(reply)
            self.ledger.entries.append(Entry(*about, UP, *sizes, error=reply.has_error()))
        return replies


def _about(message: Message) -> tuple[str, str, str]:
    """Return the phase, user and type of a message that goes out."""
    envelope = message.content.config_records.get(ENVELOPE)
    kind = message.metadata.message_type
    if envelope is None:
        return NO_PHASE, "", kind
    return str(envelope["phase"]), str(envelope["user"]), kind


class _Sizes:
    """Bytes of messages; a record that goes out again and again is serialized once."""

    def __init__(self) -> None:
        # The records themselves are kept, so that no other one gets their id.
        self.known: deque[tuple[ArrayRecord, str, dict[str, int]]] = deque(maxlen=8)

    def of(self, message: Message) -> tuple[int, int, int, int]:
        """Return a message's bytes in the order of :data:`BYTES`."""
        if message.has_error():
            return 0, 0, 0, len(message.deflate())
        objects: dict[str, int] = {}
        light = RecordDict()
        arrays = metadata = report = 0
        roots: list[str] = []
        for key, record in message.content.items():
            if isinstance(record, ArrayRecord):
                root, found = self._objects(record)
                # Ids are all of one length, so the message's own objects keep their size with
                # something small in the place of each record, the same for equal ones.
                roots += [root] if root not in roots else []
                light[key] = _stand_in(roots.index(root))
                if key in REPORTS:
                    report += sum(len(array.data) for array in record.values())
                else:
                    arrays += sum(len(array.data) for array in record.values())
            else:
                found = {record.object_id: len(record.deflate())}
                light[key] = record
                if key in REPORTS:
                    report += sum(found.values())
                else:
                    metadata += sum(found.values())
            objects |= found
        shell = make_message(message.metadata, light)
        own = len(shell.deflate()) + len(light.deflate())
        return arrays, metadata, report, own + sum(objects.values())

    def _objects(self, record: ArrayRecord) -> tuple[str, dict[str, int]]:
        """Return a record's id, and the size of each object that it is serialized to by its id."""
        for known, root, sizes in self.known:
            if known is record:
                return root, sizes
        with no_object_id_recompute():
            root = record.object_id
            sizes = {i: len(o.deflate()) for i, o in get_all_nested_objects(record).items()}
        self.known.append((record, root, sizes))
        return root, sizes


def _stand_in(number: int) -> ArrayRecord:
    return ArrayRecord({"n": Array(dtype="u1", shape=(1,), stype="", data=bytes([number]))})
