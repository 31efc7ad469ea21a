"""Where things are kept on this machine."""

import hashlib
import os
from functools import cache
from pathlib import Path


def home() -> Path:
    """Return where caches, models and data are kept: ``$PERPCS_HOME`` or ``~/.fl-perpcs``."""
    folder = os.environ.get("PERPCS_HOME") or Path.home() / ".fl-perpcs"
    return Path(folder).expanduser().resolve()


@cache
def source_digest() -> str:
    """Return a digest of this package's source.

    The server sends it with every message and a client compares it with its own: a worker
    that imports another checkout would otherwise run other code than the server, silently.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
