"""The run folder: everything that a run leaves behind.

====================  ==========================================================
``config.toml``       the resolved config
``versions.json``     seed, versions of what ran, digest of the source
``events.jsonl``      progress, one line per step; the launcher follows it
``adaptation/``       the task adapter, a PEFT folder
``pool/``             the pool (:mod:`fl_perpcs.pool`)
``recipes.json``      the targets' recipes (:mod:`fl_perpcs.assembly`)
``metrics.jsonl``     what each user reported in each phase; the same in every run
``workers.jsonl``     seconds, process and base LLM loads behind each reply
``predictions/``      ``<method>.jsonl``: query, prediction and gold of each target
``results.json``      the result table
``report.html``       the report (:mod:`fl_perpcs.report`)
====================  ==========================================================

Predictions hold the targets' gold outputs: a run folder is the researcher's, not something a
server of a real federation would have.
"""

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from fl_perpcs.config import Config, load_config, read_config_file
from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home, source_digest

LIBRARIES = ("flwr", "ray", "torch", "transformers", "peft", "safetensors", "scikit-learn")


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    folder: Path

    def event(self, event: str, **fields: Any) -> None:
        """Append a line to ``events.jsonl``."""
        self._append("events.jsonl", {"time": round(time.time(), 3), "event": event, **fields})

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell how far a phase is, in users, and how much memory this process takes, in bytes."""
        memory = psutil.Process().memory_info().rss
        self.event("phase", phase=phase, done=done, total=total, memory=memory)

    def record(
        self, phase: str, user: str, metrics: Mapping[str, Any], worker: Mapping[str, Any]
    ) -> None:
        """Append what a user reported in a phase to ``metrics.jsonl`` and ``workers.jsonl``."""
        if metrics:
            self._append("metrics.jsonl", {"phase": phase, "user": user, **metrics})
        self._append("workers.jsonl", {"phase": phase, "user": user, **worker})

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the run folder, whole or not at all."""
        write_atomically(
            self.folder / name, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
        )

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a JSON-lines file of the run folder, whole or not at all."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(self.folder / name, text)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def default_run_dir(config: Config, root: Path) -> Path:
    """Return a new folder name for a run under ``root``."""
    return root / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def create_run(config: Config) -> Run:
    """Create the run folder and write the resolved config and versions into it.

    Raises
    ------
    PerPcsError
        If the folder cannot be written or already holds a run.
    """
    folder = Path(config.run.dir) if config.run.dir else default_run_dir(config, home() / "runs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if holds_run(folder):
            raise PerPcsError(taken(folder))
        write_atomically(folder / "config.toml", tomli_w.dumps(config.model_dump(by_alias=True)))
    except OSError as error:
        raise PerPcsError(
            f"the run folder {folder} cannot be written ({error.strerror});"
            " set run.dir to a folder that you can write to"
        ) from None
    run = Run(folder)
    run.write_json(
        "versions.json",
        {
            "seed": config.seed,
            "source": source_digest(),
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **{name: version(name) for name in LIBRARIES},
        },
    )
    return run


def open_run(folder: Path) -> tuple[Run, Config]:
    """Open a run folder to read it.

    Raises
    ------
    PerPcsError
        If the folder holds no run.
    """
    if not holds_run(folder):
        raise PerPcsError(f"{folder} is not a run folder: it has no config.toml")
    return Run(folder), load_config(read_config_file(folder / "config.toml"))


def holds_run(folder: Path) -> bool:
    """Tell whether a run was started in a folder."""
    return (folder / "config.toml").is_file()


def taken(folder: Path) -> str:
    """Return what is wrong with a run folder that holds a run already."""
    return f"run.dir = {str(folder)!r} already holds a run; name another folder or remove it"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder.

    Raises
    ------
    PerPcsError
        If it is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PerPcsError(f"{path} does not exist: the run did not get that far") from None
    except ValueError as error:
        raise PerPcsError(f"{path} is damaged ({error}); run the simulation again") from None
    if not isinstance(value, dict):
        raise PerPcsError(f"{path} is damaged: expected an object; run the simulation again")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
