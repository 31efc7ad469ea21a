"""The launcher against fake Flower commands: small scripts that end as real runs do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fl_perpcs.config import ConfigError
from fl_perpcs.errors import PerPcsError
from fl_perpcs.launcher import launch
from fl_perpcs.preflight import absolute_paths, check, find_app
from fl_perpcs.processes import MARK, dismiss_guard, launched, start_guard, stop_launched
from fl_perpcs.superlink import RunError

ROOT = Path(__file__).parent.parent

FAKE_SUPERLINK = """
import http.server, os, pathlib, subprocess, sys, time
state = pathlib.Path(os.environ["FAKE_STATE"])
port = int(sys.argv[sys.argv.index("--port") + 1])
with (state / "ports").open("a") as file:
    file.write(f"{port}\\n")
(state / "environment").write_text("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
(state / "cwd").write_text(os.getcwd())
if os.environ["FAKE_MODE"] == "no-superlink":
    sys.exit("the disk is full")
# Like Ray: a daemon in a session of its own; to try killing, one that ignores SIGTERM.
ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if "STUBBORN" in os.environ else "0"
daemon = f"import signal, time; {ignore}; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
if os.environ["FAKE_MODE"] == "superlink-dies":
    server.timeout = 0.5
    end = time.time() + 2
    while time.time() < end:
        server.handle_request()
    sys.exit(1)
server.serve_forever()
"""

FAKE_FLWR = """
import json, os, pathlib, sys, time, tomllib
state, mode = pathlib.Path(os.environ["FAKE_STATE"]), os.environ["FAKE_MODE"]
if sys.argv[1] == "ls":
    status, details = {
        "ok": ("finished:completed", ""),
        "crash": ("finished:failed", "Simulation failed with exception: boom"),
        "message": ("finished:failed", "boom"),
        "swallowed": ("finished:completed", ""),
    }[mode]
    row = {"status": status, "status-details": details}
    print(json.dumps({"success": True, "runs": [row]}))
    sys.exit(0)
(state / "arguments").write_text(json.dumps(sys.argv[1:]))
if mode == "refused":
    sys.exit("Invalid Flower App configuration")
config = tomllib.loads(pathlib.Path(sys.argv[sys.argv.index("--run-config") + 1]).read_text())
run = pathlib.Path(config["run.dir"])
run.mkdir(parents=True)
(run / "config.toml").write_text("")
def event(**fields):
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\\n")
print("Successfully started run 123", flush=True)
event(event="run", status="started")
event(event="phase", phase="share", done=0, total=3)
if mode in ("slow", "superlink-dies"):
    time.sleep(600)
event(event="phase", phase="share", done=3, total=3)
if mode in ("message", "swallowed"):
    event(event="run", status="failed", message="user u3 has no history")
elif mode == "ok":
    event(event="run", status="completed")
else:
    print("Traceback: boom")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of fake commands; afterwards nothing may be left."""
    commands, state = tmp_path / "bin", tmp_path / "state"
    commands.mkdir()
    state.mkdir()
    for name, body in (("flower-superlink", FAKE_SUPERLINK), ("flwr", FAKE_FLWR)):
        script = commands / name
        script.write_text(f"#!{sys.executable}\n{body}")
        script.chmod(0o755)
    monkeypatch.setenv("FAKE_STATE", str(state))
    monkeypatch.setenv("FAKE_MODE", "ok")
    yield commands
    assert _left(state) == []


def _left(state: Path) -> list[psutil.Process]:
    """Return the processes that a launch with this state folder started and that live."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if MARK in environment and environment.get("FAKE_STATE") == str(state):
            found.append(process)
    return found


def _values(tmp_path: Path) -> dict[str, str | int | float | bool]:
    return {"lm.name": "someone/some-lm", "run.dir": str(tmp_path / "run")}


def _launch(tmp_path: Path, fake: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_MODE", mode)
    return launch(_values(tmp_path), ROOT, commands=fake).folder


def test_a_completed_run(
    tmp_path: Path,
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = _launch(tmp_path, fake, "ok", monkeypatch)

    assert folder == tmp_path / "run"
    assert "Successfully started run" in (folder / "flower.log").read_text()
    lines = capsys.readouterr().out
    assert "share: 3 users" in lines
    assert "share: done in" in lines


def test_the_superlink_is_isolated(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:1234")
    monkeypatch.setenv("PERPCS_HOME", "relative")
    monkeypatch.chdir(tmp_path)

    _launch(tmp_path, fake, "ok", monkeypatch)

    environment = dict(
        line.partition("=")[::2]
        for line in (tmp_path / "state" / "environment").read_text().splitlines()
    )
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["PERPCS_HOME"] == str(tmp_path / "relative")
    assert "RAY_ADDRESS" not in environment
    folder = Path(environment["RAY_TMPDIR"])
    assert Path(environment["FLWR_HOME"]).parent == folder
    assert (tmp_path / "state" / "cwd").read_text() == str(folder / "work")
    assert not folder.exists()
    arguments = json.loads((tmp_path / "state" / "arguments").read_text())
    assert arguments[:4] == ["run", str(ROOT), "own", "--stream"]
    assert arguments[-1].startswith("num-supernodes=4 client-resources-num-cpus=1 ")


def test_a_crash_that_exits_zero_is_an_error(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="exception: boom") as error:
        _launch(tmp_path, fake, "crash", monkeypatch)
    assert "Traceback: boom" in str(error.value)
    *_, last = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(last)["status"] == "failed"


@pytest.mark.parametrize("mode", ["message", "swallowed"])
def test_the_runs_own_message_is_the_error(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with pytest.raises(RunError, match="the run failed: user u3 has no history"):
        _launch(tmp_path, fake, mode, monkeypatch)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("no-superlink", "did not start.*\n.*the disk is full"),
        ("superlink-dies", "SuperLink died"),
        ("refused", "Invalid Flower App configuration"),
    ],
)
def test_an_early_death(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    with pytest.raises(RunError, match=f"(?s){message}"):
        _launch(tmp_path, fake, mode, monkeypatch)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_stops_everything(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    if number == signal.SIGINT:
        monkeypatch.setenv("STUBBORN", "1")
    process = _start_slow_run(tmp_path, fake, monkeypatch, "run")
    assert len(_left(tmp_path / "state")) >= 3

    process.send_signal(number)

    assert process.wait(timeout=20) == code
    # When the launcher itself was killed, its guard needs a moment.
    _wait_for(lambda: not _left(tmp_path / "state"))
    if number != signal.SIGKILL:
        assert "interrupted" in (tmp_path / "run" / "events.jsonl").read_text()


def test_two_launchers_use_two_ports(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_start_slow_run(tmp_path, fake, monkeypatch, name) for name in ("one", "two")]
    first, second = (tmp_path / "state" / "ports").read_text().split()
    assert first != second

    runs[0].send_signal(signal.SIGINT)
    assert runs[0].wait(timeout=20) == 130
    assert runs[1].poll() is None
    assert len(_left(tmp_path / "state")) >= 3, "the other run must live on"

    runs[1].send_signal(signal.SIGINT)
    assert runs[1].wait(timeout=20) == 130


def _start_slow_run(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> subprocess.Popen[bytes]:
    monkeypatch.setenv("FAKE_MODE", "slow")
    code = (
        "import sys, typer; from pathlib import Path; from fl_perpcs import cli, launcher\n"
        "def run():\n"
        "    with cli.errors_as_messages():\n"
        f"        launcher.launch({{'lm.name': 'a/b', 'run.dir': {str(tmp_path / name)!r}}},"
        f" Path({str(ROOT)!r}), commands=Path({str(fake)!r}))\n"
        "typer.run(run)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    _wait_for(lambda: (tmp_path / name / "events.jsonl").exists())
    return process


def _wait_for(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_every_problem_of_a_config_is_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        launch({"lora.rank": 0, "nonsense": 1, "run.dir": str(tmp_path)}, ROOT)
    assert "lora.rank" in str(error.value)
    assert "nonsense" in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        check({"run.dir": str(tmp_path / "run")}, ROOT)


def test_run_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check({"run.dir": str(tmp_path / "file" / "run")}, ROOT)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        check({"run.dir": str(tmp_path)}, ROOT)


def test_resources_that_flower_cannot_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine"):
        check({"federation.client-cpus": 10_000, "run.dir": str(tmp_path / "run")}, ROOT)


def test_the_default_run_folder_is_under_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(check({"run.name": "mine"}, ROOT).run.dir)
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("mine-")
    assert not folder.parent.exists()


def test_relative_paths_start_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text("{}")
    given = {"run.dir": "out", "lm.name": "lm", "adaptation.adapter": ""}
    assert absolute_paths(given) == {
        "run.dir": str(tmp_path / "out"),
        "lm.name": str(tmp_path / "lm"),
        "adaptation.adapter": "",
    }
    assert absolute_paths({"lm.name": "someone/lm"}) == {"lm.name": "someone/lm"}


def test_the_app_is_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_app() == ROOT
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fl_perpcs.__file__", str(tmp_path / "site" / "fl_perpcs" / "x.py"))
    with pytest.raises(PerPcsError, match="no Flower app here"):
        find_app()


def test_a_guard_that_is_dismissed_stops_nothing(tmp_path: Path) -> None:
    launch_id = "test-guard"
    child = subprocess.Popen(["sleep", "60"], env={MARK: launch_id})
    guard = start_guard(launch_id, tmp_path)
    dismiss_guard(guard)
    assert [process.pid for process in launched(launch_id)] == [child.pid]
    assert tmp_path.exists()

    assert stop_launched(launch_id) == []
    child.wait()
    assert not psutil.pid_exists(child.pid)
