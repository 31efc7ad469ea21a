"""LaMP's files from LaMP's own server."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from fl_perpcs.data.json_index import records
from fl_perpcs.data.lamp import Owners, default_folder, read_golds
from fl_perpcs.data.lamp_text import lamp_task
from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch.download import discard, download, keep, web_page
from fl_perpcs.fetch.output import console, step
from fl_perpcs.runs import write_atomically
from fl_perpcs.tasks import Task

BASE = "https://ciir.cs.umass.edu/downloads/LaMP"
NOTICE = "LaMP (Salemi et al., 2024); terms of use: https://lamp-benchmark.github.io"
SPLITS = ("train", "dev", "test")
SEPARATIONS = ("user", "time")


def fetch_lamp(
    task: str,
    split: str = "train",
    separation: str = "user",
    url: str = "",
    dest: Path | None = None,
) -> Path:
    """Download the questions and outputs of a LaMP task.

    Parameters
    ----------
    task : str
        ``LaMP-2M``, in any case.
    split : {"train", "dev", "test"}
        The test split has no outputs.
    separation : {"user", "time"}
        LaMP's two ways to split. Time-based files go to a folder of their own,
        ``<task>-time``: set ``data.path`` to it to use them.
    url : str
        The folder on another server; empty: LaMP's own.
    dest : Path, optional
        The folder to write; ``$PERPCS_HOME/data/lamp/<task>`` by default. Files that are there
        are not downloaded again.

    Returns
    -------
    Path
        The folder, with ``{split}_questions.json``, ``{split}_outputs.json`` and
        ``manifest.json`` (URL, size, SHA-256 and date of each file). A file appears when it is
        whole and checked.

    Raises
    ------
    PerPcsError
        If the task is unknown or not public, the server cannot be reached, or what it sends is
        not what LaMP's files are like.

    References
    ----------
    Salemi, Mysore, Bendersky and Zamani, "LaMP: When Large Language Models Meet
    Personalization", ACL 2024.
    """
    found = _public_task(task)
    for name, value, known in (("split", split, SPLITS), ("separation", separation, SEPARATIONS)):
        if value not in known:
            raise PerPcsError(f"--{name} {value} is not known; expected one of {', '.join(known)}")
    folder = dest or default_folder(found.name, separation)
    urls = _urls(found, split, separation, url or BASE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            _fetch(folder, urls, split)
    except OSError as error:
        raise PerPcsError(f"{folder} cannot be written: {error.strerror}") from None
    console.print(_hint(found.name, split, separation, folder), highlight=False, soft_wrap=True)
    return folder


def _public_task(name: str) -> Task:
    task, form = lamp_task(name.lower())
    if not form.path:
        raise PerPcsError(
            f"{task.name} cannot be downloaded: its texts are licensed (LaMP-6 is made of the"
            " Avocado e-mails, LDC2015T03). Get the licence from catalog.ldc.upenn.edu, build the"
            " files with the script in LaMP's repository, data/avocado/create_avocado_dataset.py,"
            f" and set data.path to their folder or put them into {default_folder(task.name)}"
        )
    return task


def _urls(task: Task, split: str, separation: str, base: str) -> dict[str, str]:
    """Return the addresses of a split's files by name."""
    assert task.lamp is not None
    parts = [base.rstrip("/"), *(["time"] if separation == "time" else []), task.lamp.path, split]
    kinds = ["questions"] if split == "test" else ["questions", "outputs"]
    names = [f"{split}_{kind}.json" for kind in kinds]
    return {name: "/".join([*parts, name]) for name in names}


def _fetch(folder: Path, urls: dict[str, str], split: str) -> None:
    """Download what is missing, check all of it, and only then give it its name."""
    manifest = _manifest(folder)
    missing = {name: url for name, url in urls.items() if not _is_there(folder / name, manifest)}
    if not missing:
        return
    for name, url in missing.items():
        part = _part(folder / name)
        download(url, part)
        if _first_byte(part) not in (b"[", b"{"):
            problem = web_page(url) if _first_byte(part) == b"<" else f"{url}: this is not JSON"
            discard(part)
            raise PerPcsError(problem)
    here = {name: _part(folder / name) if name in missing else folder / name for name in urls}
    try:
        with step(f"checking {', '.join(here)}"):
            check_files(here[f"{split}_questions.json"], here.get(f"{split}_outputs.json"))
    except PerPcsError:
        for name in missing:  # whole, and yet wrong: resuming would not mend them
            discard(here[name])
        raise
    manifest["files"] |= {name: _entry(here[name], url) for name, url in missing.items()}
    # First: a file that the manifest does not know is somebody else's.
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    for name in missing:
        keep(here[name], folder / name)


def check_files(questions: Path, outputs: Path | None) -> None:
    """Check that files have LaMP's form, to the end, and each question its gold.

    Raises
    ------
    PerPcsError
        If not; names the file and the record.
    """
    owner = Owners()
    asked = [
        owner(record.value, f"{questions}, record {record.number}")[1]
        for record in records(questions)
    ]
    if not asked:
        raise PerPcsError(f"{questions} has no questions; expected some. Fetch it again")
    golds = read_golds(outputs) if outputs else None
    without = [] if golds is None else [question for question in asked if question not in golds]
    if without:
        raise PerPcsError(
            f"{questions}: question {without[0]!r} has no gold in {outputs} ({len(without)} such);"
            " expected files that belong together. Fetch both again"
        )


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (FileNotFoundError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return {"about": NOTICE, "files": {}}
    return manifest


def _is_there(path: Path, manifest: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    entry = manifest["files"].get(path.name)
    if not isinstance(entry, dict) or path.stat().st_size != entry.get("size"):
        raise PerPcsError(
            f"{path} is there, but not as manifest.json of the folder says; expected a file that"
            " `perpcs fetch lamp` put there, or none. Move it away and fetch again"
        )
    return True


def _entry(path: Path, url: str) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"url": url, "size": path.stat().st_size, "sha256": digest, "date": date}


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _hint(task: str, split: str, separation: str, folder: Path) -> str:
    words = f"data.source=lamp data.task={task} data.split={split}"
    if folder != default_folder(task):
        words += f" data.path={folder}"
    return f"use with: {words}" if split != "test" else "the test split has no outputs"
