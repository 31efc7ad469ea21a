"""A SuperLink, a port and folders of a launch's own, and Flower's commands talking to it."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import tomli_w

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.preflight import declared_keys
from fl_perpcs.processes import MARK, dismiss_guard, ignore_signals, start_guard, stop_launched

STARTUP = 60.0
"""Seconds that a SuperLink may take to answer."""
TAIL = 25
"""Lines of the log that an error shows."""

FLOWER_ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
FOREIGN = ("RAY_ADDRESS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
"""Variables that would tie a run to another SuperLink or Ray."""


class RunError(PerPcsError):
    """A run that started and did not complete."""


@dataclass(frozen=True)
class Place:
    """Where one launch lives: its id, temporary folder, Flower's commands and environment."""

    id: str
    folder: Path
    commands: Path
    environment: dict[str, str]

    @property
    def superlink_log(self) -> Path:
        """What the SuperLink says."""
        return self.folder / "superlink.log"

    @property
    def run_log(self) -> Path:
        """What ``flwr run`` and the ServerApp say."""
        return self.folder / "run.log"


@contextmanager
def own_place(config: Config, commands: Path) -> Iterator[Place]:
    """Make the launch's folder; afterwards stop its processes and remove the folder."""
    launch_id = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="perpcs-run-", dir=_short_temporary_folder()))
    guard = start_guard(launch_id, folder)
    try:
        (folder / "work").mkdir()
        (folder / "flwr").mkdir()
        yield Place(launch_id, folder, commands, _environment(launch_id, folder, commands, config))
    finally:
        ignore_signals()
        left = stop_launched(launch_id)
        shutil.rmtree(folder, ignore_errors=True)
        dismiss_guard(guard)
        if left:
            print(f"could not stop the processes {left}; stop them with: kill -9", *left)


def _short_temporary_folder() -> str | None:
    """Ray puts sockets below this folder, and their paths must stay under 104 characters."""
    return None if len(tempfile.gettempdir()) <= 15 or not Path("/tmp").is_dir() else "/tmp"


def _environment(launch_id: str, folder: Path, commands: Path, config: Config) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    # Flower finds its own programs on PATH, and this Python's folder may not be on it.
    environment["PATH"] = f"{commands}{os.pathsep}{environment.get('PATH', os.defpath)}"
    no_proxy = environment.get("NO_PROXY", environment.get("no_proxy", ""))
    environment["NO_PROXY"] = environment["no_proxy"] = f"127.0.0.1,localhost,{no_proxy}"
    environment |= FLOWER_ENVIRONMENT
    environment |= {
        MARK: launch_id,
        "FLWR_HOME": str(folder / "flwr"),
        "RAY_TMPDIR": str(folder),
    }
    if home := environment.get("PERPCS_HOME"):
        environment["PERPCS_HOME"] = str(Path(home).expanduser().absolute())
    strategies = (config.strategy.name, config.adaptation.strategy)
    if any(_is_here(name) for name in strategies):
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (environment.get("PYTHONPATH", ""), str(Path.cwd())) if part
        )
    return environment


def _is_here(import_path: str) -> bool:
    """Return whether ``package.module:name`` starts in the current folder."""
    module, colon, _ = import_path.partition(":")
    top = module.partition(".")[0]
    return bool(colon) and (Path(f"{top}.py").is_file() or Path(top).is_dir())


def start_superlink(place: Place) -> tuple[subprocess.Popen[bytes], int]:
    """Start a SuperLink on a free port and wait until it answers.

    It binds this one port: Flower 1.42 serves its Runtime, Control and Fleet APIs there.
    """
    for _ in range(3):  # another program may take the port between asking and binding
        port = _free_port()
        command = [
            "flower-superlink",
            "--insecure",
            "--simulation",
            "--isolation",
            "subprocess",
        ]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = start_command(place, command, place.superlink_log)
        if _wait_until_healthy(superlink, port):
            return superlink, port
        if "address already in use" not in read_log(place.superlink_log).lower():
            break
    raise RunError(
        "Flower's SuperLink did not start; the end of its log:\n" + tail_of(place.superlink_log)
    )


def submit_app(place: Place, config: Config, app_dir: Path, port: int) -> subprocess.Popen[bytes]:
    """Start ``flwr run --stream``: it hands the app over, then prints its log until the end."""
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    flower_config = {"superlink": {"default": "own", "own": connection}}
    (place.folder / "flwr" / "config.toml").write_text(tomli_w.dumps(flower_config))
    declared = declared_keys(app_dir)
    run_config = {key: value for key, value in config.flat().items() if key in declared}
    path = place.folder / "run-config.toml"
    path.write_text(tomli_w.dumps(run_config), encoding="utf-8")
    federation = config.federation
    command = ["flwr", "run", str(app_dir), "own", "--stream", "--run-config", str(path)]
    command += [
        "--federation-config",
        f"num-supernodes={federation.num_supernodes}"
        f" client-resources-num-cpus={int(federation.client_cpus)}"
        f" client-resources-num-gpus={float(federation.client_gpus)}",
    ]
    return start_command(place, command, place.run_log)


def ask_status(place: Place) -> tuple[str, str]:
    """Ask Flower how the run ended: a crashed ServerApp leaves no other trace."""
    found = re.search(r"Successfully started run (\d+)", read_log(place.run_log))
    if not found:
        return "not started", "Flower did not accept the app"
    command = ["flwr", "ls", "own", "--run-id", found[1], "--format", "json"]
    answer = place.folder / "ls.json"
    process = start_command(place, command, answer)
    try:
        process.wait(timeout=STARTUP)
        (row,) = json.loads(read_log(answer))["runs"]
        return str(row["status"]), str(row.get("status-details") or "")
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return "unknown", "Flower does not say how the run ended"


def start_command(place: Place, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a Flower command in the empty folder, out of reach of the terminal's Ctrl-C."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [str(place.commands / command[0]), *command[1:]],
            cwd=place.folder / "work",
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def find_simulation(superlink: subprocess.Popen[bytes]) -> psutil.Process | None:
    """Find the process that runs ServerApp and Ray."""
    try:
        for process in psutil.Process(superlink.pid).children(recursive=True):
            if any("flwr-simulation" in argument for argument in process.cmdline()):
                return process
    except psutil.Error:
        pass
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(superlink: subprocess.Popen[bytes], port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + STARTUP
    while superlink.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(f"http://127.0.0.1:{port}/health", timeout=1.0):
                return superlink.poll() is None
        except OSError:
            time.sleep(0.1)
    return False


def read_log(path: Path) -> str:
    """Return a log so far."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def tail_of(path: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(read_log(path).strip().splitlines()[-TAIL:])
