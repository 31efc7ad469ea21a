"""Whole federations through Flower and Ray."""

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from real_runs import BIN, ROOT, SMALL

from fl_perpcs.runs import read_lines

pytestmark = pytest.mark.e2e


def words(values: dict) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def perpcs_run(folder: Path, **overrides) -> subprocess.CompletedProcess:
    values = SMALL | {"run.dir": str(folder)} | overrides
    return subprocess.run(
        [BIN / "perpcs", "run", *words(values)], capture_output=True, text=True, timeout=600
    )


def digest(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


SAME = ("metrics.jsonl", "pool", "recipes.json", "predictions", "results.json", "adaptation")


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    done = perpcs_run(folder, **{"federation.num-supernodes": 2})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_run_leaves_everything_and_says_where(two_nodes):
    results = json.loads((two_nodes / "results.json").read_text())
    assert [row["method"] for row in results["methods"]] == ["base", "assembled", "oppu"]
    assert all(row["users"] == 4 and row["queries"] == 24 for row in results["methods"])
    assert (two_nodes / "report.html").stat().st_size > 10_000
    assert read_lines(two_nodes / "events.jsonl")[-1]["status"] == "completed"


def test_twelve_nodes_give_the_same_bytes_as_two(two_nodes, tmp_path):
    folder = tmp_path / "run"
    done = perpcs_run(folder, **{"federation.num-supernodes": 12})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in SAME:
        assert digest(folder / name) == digest(two_nodes / name), name


def test_the_base_llm_is_loaded_once_in_each_worker(two_nodes):
    rows = read_lines(two_nodes / "workers.jsonl")
    workers = {row["pid"] for row in rows}
    assert len(rows) > 20
    assert 1 <= len(workers) <= (os.cpu_count() or 1)
    assert {row["lm-loads"] for row in rows} == {1}


def test_plain_flwr_run_gives_the_same_bytes(two_nodes, tmp_path):
    folder, home = tmp_path / "run", tmp_path / "flwr"
    home.mkdir()
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "39391",
        "FLWR_LOCAL_CONTROL_API_PORT": "39393",
    }
    config = " ".join(words(SMALL | {"run.dir": str(folder)}))
    federation = "num-supernodes=2 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    command = [BIN / "flwr", "run", ROOT, "--stream", "--run-config", config]
    try:
        done = subprocess.run(
            [*command, "--federation-config", federation],
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            cwd=tmp_path,
        )
        assert (folder / "report.html").is_file(), done.stdout + done.stderr
    finally:
        stop_processes_of(home)
    for name in SAME:
        assert digest(folder / name) == digest(two_nodes / name), name


def stop_processes_of(home: Path) -> None:
    """Plain `flwr run` leaves its SuperLink running; a test must not."""
    import psutil

    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("FLWR_HOME") == str(home):
            process.terminate()


def test_a_client_that_raises_ends_the_run_with_its_message(tmp_path):
    done = perpcs_run(tmp_path / "run", **{"adapter.lr": 1e30})
    assert done.returncode == 1
    assert "phase 'share'" in done.stderr
    assert "lower the lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_lines(tmp_path / "run" / "events.jsonl")[-1]["status"] == "failed"


def test_a_pool_of_another_base_llm_is_refused(two_nodes, tmp_path):
    # The same LM without the adaptation that the pool's pieces were trained on.
    overrides = {"sharers.pool": str(two_nodes / "pool"), "adaptation.mode": "none"}
    done = perpcs_run(tmp_path / "run", **overrides)
    assert done.returncode == 1
    assert "trained on base LLM" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_of_the_same_base_llm_is_used_again(two_nodes, tmp_path):
    overrides = {
        "sharers.pool": str(two_nodes / "pool"),
        "adaptation.mode": "load",
        "adaptation.adapter": str(two_nodes / "adaptation"),
    }
    done = perpcs_run(tmp_path / "run", **overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("recipes.json", "predictions", "pool"):
        assert digest(tmp_path / "run" / name) == digest(two_nodes / name), name


def test_a_typo_is_found_before_anything_starts(tmp_path):
    start = time.monotonic()
    done = perpcs_run(tmp_path / "run", **{"assembly.topk": 3})
    assert done.returncode == 2
    assert "assembly.top-k" in done.stderr
    assert time.monotonic() - start < 10
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_written_is_found_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = perpcs_run(tmp_path / "file" / "run")
    assert done.returncode in (1, 2)
    assert "run.dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_no_process_behind(tmp_path):
    import psutil

    before = {process.pid for process in psutil.process_iter()}
    values = words(SMALL | {"run.dir": str(tmp_path / "run"), "adapter.steps": 2000})
    launcher = subprocess.Popen(
        [BIN / "perpcs", "run", *values], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    events = tmp_path / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while not (events.is_file() and "adapt" in events.read_text()):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    time.sleep(1)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    names = ("ray", "flwr", "flower", "perpcs")
    assert not [p for p in left if any(n in " ".join(p.info["cmdline"] or []) for n in names)]


def test_the_exported_adapter_gives_the_same_logits(two_nodes, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from fl_perpcs.assembly import cook
    from fl_perpcs.lm import load_lm, merge_into_base, model_path, put_adapter
    from fl_perpcs.pieces import load_peft
    from fl_perpcs.pool import load_pool
    from fl_perpcs.runs import open_run

    _, config = open_run(two_nodes)
    recipes = json.loads((two_nodes / "recipes.json").read_text())
    user = sorted(recipes)[0]
    out = tmp_path / "adapter"
    subprocess.run([BIN / "perpcs", "export", two_nodes, user, out], check=True)
    base = AutoModelForCausalLM.from_pretrained(model_path(config.lm.name))
    exported = PeftModel.from_pretrained(base, out).eval()

    lm = load_lm(config)
    merge_into_base(lm, load_peft(two_nodes / "adaptation")[0])
    put_adapter(lm, cook(recipes[user], load_pool(two_nodes / "pool").stacks(), "factor"))
    lm.model.eval()
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.inference_mode():
        torch.testing.assert_close(exported(ids).logits, lm.model(ids).logits, atol=1e-5, rtol=0.0)
