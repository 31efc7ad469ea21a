"""Find and stop everything that one launch started.

Ray's daemons leave the process group of whoever started them, and its workers rename
themselves, so neither a group nor a name finds them all. Every process of a launch inherits
the launch's id in its environment, or descends from one that does.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

MARK = "PERPCS_LAUNCH_ID"
"""The environment variable that every process of a launch inherits."""


def launched(launch_id: str) -> list[psutil.Process]:
    """Return the live processes of a launch, this one left out.

    Parameters
    ----------
    launch_id : str
        The value of :data:`MARK` in the launch's environment.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == launch_id:
                found |= {process, *process.children(recursive=True)}
        except psutil.Error:  # gone, a zombie, or another user's
            continue
    return [process for process in found if process.pid != os.getpid()]


def stop_launched(launch_id: str, patience: float = 5.0) -> list[int]:
    """Stop every process of a launch.

    Parameters
    ----------
    launch_id : str
        See :func:`launched`.
    patience : float
        Seconds between asking and killing.

    Returns
    -------
    list of int
        Process ids that could not be stopped.
    """
    # A process may start another one while it is being stopped: look again until none is left.
    for attempt in range(5):
        processes = launched(launch_id)
        if not processes:
            break
        if attempt == 0:
            _signal(processes, "terminate")
            _, processes = psutil.wait_procs(processes, timeout=patience)
        _signal(processes, "kill")
        psutil.wait_procs(processes, timeout=patience)
    return [process.pid for process in launched(launch_id)]


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turn the signals that end a program into exceptions, so that it tidies up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ending_signals()}
    for number, handler in before.items():
        # nohup ignores SIGHUP on purpose; a shell ignores SIGINT for its background jobs.
        if handler != signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    ignore_signals()  # a second Ctrl-C must not interrupt the tidying
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def ignore_signals() -> None:
    """Let no signal interrupt the tidying."""
    if threading.current_thread() is threading.main_thread():
        for number in _ending_signals():
            signal.signal(number, signal.SIG_IGN)


def _ending_signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def start_guard(launch_id: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that stops a launch should this process be killed outright.

    The guard waits on a pipe whose other end this process holds: it closes however this
    process ends. :func:`dismiss_guard` sends it away.
    """
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    guard = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        start_new_session=True,
    )
    assert guard.stdin is not None
    guard.stdin.write(f"{launch_id}\n{folder}\n")
    guard.stdin.flush()
    return guard


def dismiss_guard(guard: subprocess.Popen[str]) -> None:
    """Tell a guard that its launch is over."""
    assert guard.stdin is not None
    try:
        guard.stdin.write("done\n")
        guard.stdin.close()
    except BrokenPipeError:
        pass
    guard.wait()


def _guard() -> None:
    launch_id, folder, *last = sys.stdin.read().splitlines()
    if not last:
        time.sleep(0.2)  # a process that was being started has its environment by now
        stop_launched(launch_id)
        shutil.rmtree(folder, ignore_errors=True)


def _signal(processes: list[psutil.Process], how: str) -> None:
    for process in processes:
        try:
            getattr(process, how)()
        except psutil.Error:
            continue


if __name__ == "__main__":
    _guard()
