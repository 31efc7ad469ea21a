"""Follow ``events.jsonl`` and show how far a run is."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class EventReader:
    """Reads a growing ``events.jsonl``, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.outcome: str | None = None
        """``completed`` or ``failed``, once the run has said so."""
        self.message = ""
        """Why it failed."""

    def read(self) -> list[dict[str, Any]]:
        """Return the events written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                # A line that is still being written has no newline yet: leave it for later.
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole + newline)
        events = [json.loads(line) for line in whole.splitlines() if line.strip()]
        for event in events:
            if event["event"] == "run" and event["status"] in ("completed", "failed"):
                self.outcome = event["status"]
                self.message = event.get("message") or ""
        return events


class Display:
    """Shows phases: bars in a terminal, elsewhere one line when a phase begins and ends."""

    def __init__(self, show: bool = True, console: Console | None = None) -> None:
        self._show = show
        self._console = console or Console(highlight=False)
        self._bars: Progress | None = None
        self._phases: dict[str, tuple[float, TaskID | None]] = {}

    def __enter__(self) -> "Display":
        if self._show and self._console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
        self._begin("starting Flower", None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._show:
            self._console.print(text, soft_wrap=True, markup=False)

    def show(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if "starting Flower" in self._phases:
            self._end("starting Flower", None)
        if event["event"] == "phase":
            self._phase(event["phase"], event["done"], event["total"])

    def _phase(self, phase: str, done: int, total: int) -> None:
        if phase not in self._phases:
            self._begin(phase, total)
        task = self._phases[phase][1]
        if self._bars and task is not None:
            self._bars.update(task, completed=done, total=total)
        if done >= total:
            self._end(phase, total)

    def _begin(self, phase: str, total: int | None) -> None:
        task = self._bars.add_task(phase, total=total) if self._bars else None
        self._phases[phase] = (time.monotonic(), task)
        if not self._bars:
            self.say(f"{phase} …" if total is None else f"{phase}: {total} users …")

    def _end(self, phase: str, total: int | None) -> None:
        began, task = self._phases.pop(phase)
        if self._bars and task is not None:
            if total is None:
                self._bars.update(task, total=1, completed=1)
            self._bars.stop_task(task)
        else:
            self.say(f"{phase}: done in {time.monotonic() - began:.1f} s")
