"""Start a run on a SuperLink of its own, follow it, and leave nothing behind.

Plain ``flwr run`` talks to a SuperLink that outlives the run and keeps the working folder,
environment and code of whoever started it first, and it exits 0 when the ServerApp crashes.
The launcher gives each run a SuperLink, a port, a ``FLWR_HOME``, a Ray folder and an empty
working folder of its own, and tells how the run ended.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import fl_perpcs
from fl_perpcs.config import Config, Value
from fl_perpcs.errors import PerPcsError
from fl_perpcs.preflight import check, find_app, find_commands
from fl_perpcs.processes import alive, stopped_by_signals
from fl_perpcs.progress import Display, EventReader
from fl_perpcs.runs import Run, holds_run
from fl_perpcs.superlink import (
    Place,
    RunError,
    ask_status,
    find_simulation,
    own_place,
    read_log,
    start_superlink,
    submit_app,
    tail_of,
)

QUIET = 300.0
"""Seconds beyond ``run.timeout`` without any event after which a run is given up."""
SETTLE = 30.0
"""Seconds that Flower may take to end a run whose ServerApp says that it is done."""
NOTICE = 5.0
"""Seconds that Flower may take to end a run whose simulation process has ended."""


COMPLETED = "finished:completed"
"""Flower's word for a run whose ServerApp returned."""


def launch(
    values: Mapping[str, Value],
    app_dir: Path | None = None,
    show: bool = True,
    commands: Path | None = None,
) -> Run:
    """Run the app once and wait for the end.

    Parameters
    ----------
    values : mapping of str to str, int, float or bool
        Run-config keys that differ from the defaults; relative paths start in this folder.
    app_dir : Path, optional
        The folder with the Flower app's ``pyproject.toml``; found if left out.
    show : bool
        Show progress on standard output.
    commands : Path, optional
        The folder of ``flwr`` and ``flower-superlink``; that of this Python if left out.

    Returns
    -------
    Run
        The completed run.

    Raises
    ------
    ConfigError
        If the config cannot be run; nothing was started.
    RunError
        If the run did not complete. Its log is ``flower.log`` in the run folder.
    """
    app_dir = app_dir or find_app()
    commands = commands or find_commands()
    config = check(values, app_dir)
    run = Run(Path(config.run.dir))
    with stopped_by_signals(), own_place(config, commands) as place:
        preparation = _start_preparation(place, config, show)
        superlink, port = start_superlink(place)
        _finish(preparation, show)
        with Display(show) as display:
            display.say(f"run folder: {run.folder}")
            submit = submit_app(place, config, app_dir, port)
            try:
                _follow(place, config, run, superlink, submit, display)
            except BaseException as error:
                _record_end(run, error)
                raise
            finally:
                _keep_log(place, run)
    return run


PREPARE = """
import sys
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import model_path
try:
    model_path(sys.argv[1])
except PerPcsError as error:
    print(error)
    sys.exit(3)
"""


def _start_preparation(place: Place, config: Config, show: bool) -> subprocess.Popen[str] | None:
    """Train the embedded LM, or look for the fetched one, before any worker waits for it.

    In a process of its own, while the SuperLink starts: torch takes seconds to import and
    memory that this process would keep.
    """
    if config.lm.name not in ("tiny", "smollm2"):
        return None
    here = str(Path(fl_perpcs.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, place.environment.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, config.lm.name],
        cwd=place.folder / "work",
        env=place.environment | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _finish(preparation: subprocess.Popen[str] | None, show: bool) -> None:
    if preparation is None:
        return
    if show and preparation.poll() is None:
        print("preparing the base LLM; tiny is pre-trained on first use …", flush=True)
    try:
        message, _ = preparation.communicate()
    except BaseException:
        preparation.send_signal(signal.SIGINT)  # it removes its half-trained model
        preparation.wait(timeout=10)
        raise
    if preparation.returncode == 3:
        raise PerPcsError(message.strip())
    if preparation.returncode:
        raise PerPcsError(
            f"the base LLM could not be prepared (exit {preparation.returncode}); try:"
            f" {sys.executable} -c 'import fl_perpcs.lm'"
        )


def _follow(
    place: Place,
    config: Config,
    run: Run,
    superlink: subprocess.Popen[bytes],
    submit: subprocess.Popen[bytes],
    display: Display,
) -> None:
    """Show the run's progress until it ends.

    Raises
    ------
    RunError
        If it did not complete.
    """
    events = EventReader(run.folder / "events.jsonl")
    patience = config.run.timeout + QUIET
    last_news = next_look = time.monotonic()
    simulation: psutil.Process | None = None
    give_up = math.inf
    while submit.poll() is None:
        if superlink.poll() is not None:
            raise _failure(place, run, events, "Flower's SuperLink died")
        for event in events.read():
            display.show(event)
            last_news = time.monotonic()
        now = time.monotonic()
        if now - last_news > patience or now > give_up:
            break
        if events.outcome:
            patience = SETTLE if events.outcome == "completed" else NOTICE
        if now >= next_look:
            next_look = now + 3.0
            simulation = simulation or find_simulation(superlink)
            if simulation and not alive(simulation):
                give_up = min(give_up, now + NOTICE)
        time.sleep(0.1)
    for event in events.read():
        display.show(event)
    status, details = ask_status(place)
    if events.outcome == "failed" or (status.startswith("finished:") and status != COMPLETED):
        raise _failure(place, run, events, details or f"its status is {status}")
    if status == COMPLETED or events.outcome == "completed":
        return
    if simulation and not alive(simulation):
        raise _failure(place, run, events, "Flower's simulation process died")
    if submit.poll() is None:
        raise _failure(place, run, events, f"no progress for {patience:.0f} s")
    raise _failure(place, run, events, details or f"its status is {status}")


def _failure(place: Place, run: Run, events: EventReader, reason: str) -> RunError:
    log = run.folder / "flower.log"
    if events.outcome == "failed":
        return RunError(f"the run failed: {events.message or reason}\nlog: {log}")
    tail = tail_of(place.run_log) or tail_of(place.superlink_log)
    return RunError(f"the run failed: {reason}\nlog: {log}, which ends:\n{tail}")


def _keep_log(place: Place, run: Run) -> None:
    """Copy the run's log, or the SuperLink's if the run never got one, into the run folder."""
    log = place.run_log if read_log(place.run_log) else place.superlink_log
    if log.exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, run.folder / "flower.log")


def _record_end(run: Run, error: BaseException) -> None:
    """Let the run folder of an interrupted or broken run say so, unless the app already did."""
    if not holds_run(run.folder):
        return
    reader = EventReader(run.folder / "events.jsonl")
    reader.read()
    if reader.outcome is None:
        message = str(error).partition("\n")[0].removeprefix("the run failed: ")
        message = message if isinstance(error, PerPcsError) else "interrupted"
        run.event("run", status="failed", message=message)
