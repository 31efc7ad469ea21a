"""Each public LaMP format through `flwr run` and Ray, with the tiny LM, to the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fl_perpcs.runs import read_lines
from fl_perpcs.tasks import load_task

pytestmark = pytest.mark.e2e

BIN = Path(sys.executable).parent
FILES = Path(__file__).parents[1] / "lamp"
USERS = 2
"""Of each role; the files have six."""

VALUES = {
    "data.source": "lamp",
    "data.queries": 0,
    "lm.max-length": 512,
    "roles.base": USERS,
    "roles.candidates": USERS,
    "roles.targets": USERS,
    "sharers.count": USERS,
    "sharers.min-history": 1,
    "adaptation.examples": "both",
    "adaptation.rounds": 1,
    "adaptation.steps": 2,
    "adapter.steps": 2,
    "adapter.batch-size": 2,
    "gates.steps": 2,
    "gates.batch-size": 2,
    "federation.num-supernodes": 2,
}
SPECIAL = {
    "lamp-1": {"evaluation.answers": "rank"},
    "lamp-2m": {"prompts.retrieve": 2},
    "lamp-2n": {"evaluation.answers": "rank", "prompts.retrieve": 1},
    "lamp-5": {"roles.target-history": 2},
}


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([BIN / "perpcs", *words], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", [f"lamp-{n}" for n in ("1", "2m", "2n", "3", "4", "5", "7")])
def test_a_format_runs_to_the_end(name, tmp_path):
    folder = tmp_path / "run"
    own = {"data.task": name, "data.path": str(FILES / name), "run.dir": str(folder)}
    values = VALUES | own | SPECIAL.get(name, {})
    done = run("run", *(f"{key}={json.dumps(value)}" for key, value in values.items()))
    assert done.returncode == 0, done.stdout + done.stderr

    golds = json.loads((FILES / name / "train_outputs.json").read_text())["golds"]
    golds = {gold["id"]: str(gold["output"]) for gold in golds}
    results = json.loads((folder / "results.json").read_text())
    task = load_task(name)
    for row in results["methods"]:
        assert row["users"] == USERS
        assert list(row["metrics"]) == list(task.metrics)
        answers = read_lines(folder / "predictions" / f"{row['method']}.jsonl")
        assert len(answers) == row["queries"] >= USERS
        assert all(answer["gold"] == golds[answer["query"]] for answer in answers)
        if values.get("evaluation.answers") == "rank":
            assert all(answer["prediction"] in task.labels for answer in answers)

    out = run("predictions", str(folder), "assembled", str(tmp_path / "out"))
    assert out.returncode == 0, out.stderr
    exported = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert exported["task"] == task.lamp.id
    assert {gold["id"] for gold in exported["golds"]} == {answer["query"] for answer in answers}
