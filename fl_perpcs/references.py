"""Messages that name a file in place of a large record: for simulations on one machine.

A pool that goes to every target is written once and mapped into each worker's memory. The ledger
counts the record as if it had been sent.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.message import make_message
from safetensors.numpy import load_file, save_file

from fl_perpcs.errors import PerPcsError

SHARED = ("pool",)
"""Keys of records that are the same for everybody …"""
SHARED_IN = ("evaluate.assembled", "evaluate.lorahub", "query.choose")
"""… in messages of these types; in others they hold what a user asked for."""
FOLDER = "by-reference"
FILE = "file"


@dataclass
class References:
    """Shared records as files in ``<run folder>/by-reference``."""

    run_folder: Path
    written: list[tuple[ArrayRecord, Path]] = field(default_factory=list)

    def put(self, message: Message) -> Message:
        """Return a message with each shared record replaced by a reference to a file."""
        if message.metadata.message_type not in SHARED_IN:
            return message
        content = dict(message.content)
        for key in SHARED:
            record = message.content.array_records.get(key)
            if record is not None:
                content[key] = ConfigRecord({FILE: str(self._file(record))})
        return make_message(message.metadata, RecordDict(content))

    def _file(self, record: ArrayRecord) -> Path:
        for known, path in self.written:
            if known is record:
                return path
        folder = self.run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(self.written)}.safetensors"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({name: array.numpy() for name, array in record.items()}, temporary)
        temporary.replace(path)
        self.written.append((record, path))
        return path


def referred(record: ConfigRecord) -> dict[str, np.ndarray]:
    """Return the arrays that a reference names.

    Raises
    ------
    PerPcsError
        If the file is not there, or no file of a run's ``by-reference`` folder.
    """
    path = Path(str(record[FILE]))
    if path.parent.name != FOLDER or path.suffix != ".safetensors":
        raise PerPcsError(f"{path} is no file of a run's {FOLDER} folder")
    try:
        return dict(load_file(path))
    except OSError as error:
        raise PerPcsError(
            f"{path} cannot be read ({error}); exchange.by-reference is for nodes that share the"
            " server's disk"
        ) from None
