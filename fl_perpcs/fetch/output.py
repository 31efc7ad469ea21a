"""Folders that appear whole or not at all, and progress on stderr."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fl_perpcs.errors import PerPcsError

console = Console(stderr=True)


def is_complete(dest: Path, marker: str) -> bool:
    """Return whether a folder was fetched before.

    Parameters
    ----------
    dest : Path
        The folder.
    marker : str
        A file that every complete folder holds.

    Raises
    ------
    PerPcsError
        If something else lies there: it is not ours to overwrite.
    """
    if (dest / marker).is_file():
        return True
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise PerPcsError(
            f"{dest} exists but has no {marker}; expected a complete folder or none. "
            "Move it away and fetch again."
        )
    return False


@contextmanager
def new_folder(dest: Path, marker: str) -> Iterator[Path]:
    """Give a temporary folder that becomes ``dest`` if, and only if, the body succeeds.

    It lies next to ``dest``, so the last step is a rename within one file system. Should
    another process have finished first, its folder stays and this one is dropped.

    Parameters
    ----------
    dest : Path
        The final folder.
    marker : str
        A file that every complete folder holds.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            temporary.rename(dest)
        except OSError:
            if not is_complete(dest, marker):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show on stderr what is going on, and afterwards how long it took."""
    start = time.perf_counter()
    with console.status(text):
        yield
    console.print(f"{text} ({time.perf_counter() - start:.1f} s)", highlight=False)
