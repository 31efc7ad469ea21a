"""What a node keeps of its users between messages: worker processes remember nothing.

It is on the node's own disk, in ``$PERPCS_HOME/clients``; file names are digests, never user ids.
Hidden states of histories are among it; none of it is ever sent. What is a week old goes.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home

WEEK = 7 * 24 * 3600


class Drawer:
    """Named sets of tensors, each with facts that are JSON.

    Parameters
    ----------
    *parts : str
        Whose it is and what for; any text.
    """

    def __init__(self, *parts: str) -> None:
        text = "\x1f".join(parts)
        self.folder = home() / "clients" / hashlib.sha256(text.encode()).hexdigest()[:24]

    def put(self, name: str, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
        """Write a set, whole or not at all, in place of the one of this name."""
        if not self.folder.exists():
            _remove_old(self.folder.parent)
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
                f"{self._path(name)} is not there: this node did not see an earlier message, or"
                " its PERPCS_HOME has changed; run again"
            ) from None

    def keep(self) -> None:
        """Let everything here count as new."""
        os.utime(self.folder)

    def has(self, name: str) -> bool:
        """Tell whether there is a set of this name."""
        return self._path(name).is_file()

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _remove_old(root: Path) -> None:
    """Remove what nobody has written to for a week: runs that did not come to their end."""
    for folder in root.glob("*"):
        try:
            if time.time() - folder.stat().st_mtime > WEEK:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            pass  # another worker was faster
