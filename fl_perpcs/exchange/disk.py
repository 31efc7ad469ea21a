"""What a target keeps on its own node between the messages of an exchange.

Worker processes remember nothing of a user, so it is on disk: ``$PERPCS_HOME/clients``, one folder
for each user, named by a digest of the id. Hidden states of the history are among it; none of it is
ever sent.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home


class Drawer:
    """Named sets of tensors, each with facts that are JSON.

    Parameters
    ----------
    *parts : str
        Whose it is and what for; any text.
    """

    def __init__(self, *parts: str) -> None:
        names = [hashlib.sha256(part.encode()).hexdigest()[:24] for part in parts]
        self.folder = home().joinpath("clients", *names)

    def put(self, name: str, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
        """Write a set, whole or not at all, in place of the one of this name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(
            {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
            temporary,
            metadata={"facts": json.dumps(facts)},
        )
        temporary.replace(path)

    def take(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Read a set.

        Raises
        ------
        PerPcsError
            If it is not there.
        """
        try:
            with safe_open(self._path(name), framework="pt") as file:
                # Cloned: sums depend on how memory is aligned, in the last bit.
                tensors = {k: file.get_tensor(k).clone() for k in file.keys()}  # noqa: SIM118
                return tensors, json.loads(file.metadata()["facts"])
        except FileNotFoundError:
            raise PerPcsError(
                f"{self._path(name)} is not there: this node did not see the start of the"
                " exchange, or its PERPCS_HOME has changed; run again"
            ) from None

    def has(self, name: str) -> bool:
        """Tell whether there is a set of this name."""
        return self._path(name).is_file()

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
