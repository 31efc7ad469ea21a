"""Package lists from the machine's apt sources, into a folder of their own."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch.stanzas import read_stanzas

# A configuration file and not -o options: only a file can clear the hooks that machines
# run after an update (they tidy the system's own folders, which are none of our business).
CONFIGURATION = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::Languages;
Acquire::Languages {{ "en"; }};
Acquire::GzipIndexes "false";
APT::Update::Error-Mode "any";
Dir::State::lists "{root}/lists";
Dir::Cache "{root}/cache";
"""


@dataclass(frozen=True)
class AptLists:
    """Downloaded package lists.

    Attributes
    ----------
    packages, translations : tuple of Path
        ``Packages`` and ``Translation-en`` files, uncompressed.
    releases : tuple of str
        Code name and date of each release, for example ``bookworm, Sat, 01 Jan 2000
        10:00:00 UTC``, sorted.
    """

    packages: tuple[Path, ...]
    translations: tuple[Path, ...]
    releases: tuple[str, ...]


def download_lists(root: Path) -> AptLists:
    """Download the lists of all configured apt sources; the system's own stay as they are.

    Parameters
    ----------
    root : Path
        An empty folder, absolute.

    Raises
    ------
    PerPcsError
        If there is no apt, or a list cannot be downloaded, or none has descriptions.
    """
    # apt downloads as a user of its own, who has to get into the folder.
    root.chmod(0o755)
    for name in ("lists/partial", "cache/archives/partial"):
        (root / name).mkdir(parents=True)
    (root / "apt.conf").write_text(CONFIGURATION.format(root=root), encoding="utf-8")
    _apt_get(root, "update")
    targets = _apt_get(root, "indextargets", "--format", "$(CREATED_BY) $(FILENAME)")
    files = [line.split(" ", 1) for line in sorted(targets.splitlines())]
    lists = AptLists(
        packages=tuple(Path(name) for kind, name in files if kind == "Packages"),
        translations=tuple(Path(name) for kind, name in files if kind == "Translations"),
        releases=_releases(root / "lists"),
    )
    if not (lists.packages and lists.translations):
        raise PerPcsError(
            f"apt gave {len(lists.packages)} Packages and {len(lists.translations)} "
            "Translation-en lists; expected at least one of each. Configure a Debian source "
            "(see man sources.list) and try again."
        )
    return lists


def _apt_get(root: Path, *arguments: str) -> str:
    """Run apt-get with the configuration in ``root`` and return what it prints."""
    command = ["apt-get", "-q", "-c", str(root / "apt.conf"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise PerPcsError("apt-get is not there; expected a Debian machine.") from None
    if done.returncode:
        raise PerPcsError(
            f"`apt-get {arguments[0]}` failed with {done.returncode}; expected 0. "
            f"It said:\n{done.stderr.strip()[-1500:]}\n"
            "Check that the machine's package sources can be reached."
        )
    return done.stdout


def _releases(folder: Path) -> tuple[str, ...]:
    """Return code name and date of the release files in a folder."""
    releases = set()
    for path in folder.glob("*Release"):
        with path.open(encoding="utf-8", errors="replace") as lines:
            # In a signed file a stanza of the signature's own comes first.
            stanza = next((s for s in read_stanzas(lines) if "date" in s), {})
        name = stanza.get("codename") or stanza.get("suite") or "unknown"
        releases.add(f"{name}, {stanza.get('date', 'unknown date')}")
    return tuple(sorted(releases))
