"""Every strategy in a whole run, and what each must be true of whatever the data."""

import json

import pytest
from fake_grid import FakeGrid
from test_federation import federation

from fl_perpcs import client_app, server_app
from fl_perpcs.config import load_config
from fl_perpcs.runs import create_run
from strategies import REGISTRY

PROFILES = "profiles.json"


@pytest.fixture(autouse=True)
def without_report(monkeypatch):
    monkeypatch.setattr(server_app, "write_report", lambda folder: None)


def changes_for(name: str, tmp_path) -> dict:
    changes = {"strategy.name": name, "averaging.rounds": 2, "averaging.steps": 1}
    changes |= {"lorahub.evaluations": 7, "lorahub.items": 4}
    if name == "rag":
        changes["prompts.retrieve"] = 1
    if name == "pag":
        users = [f"user-{i:04d}" for i in range(11)]
        (tmp_path / PROFILES).write_text(json.dumps(dict.fromkeys(users, "likes comedy")))
        changes["prompts.profiles"] = str(tmp_path / PROFILES)
    return changes


def spied(values: dict, nodes: int = 2) -> tuple[list, str]:
    """Run and return every message that was sent, and the run folder."""
    config = load_config(values)
    grid = FakeGrid(client_app.app, values, nodes)
    server_app.run_federation(grid, config, create_run(config))
    return grid.sent, config.run.dir


@pytest.mark.parametrize("name", REGISTRY)
def test_every_strategy_runs_and_again_gives_the_same_bytes(name, small_config, tmp_path):
    changes = changes_for(name, tmp_path)
    folders = [federation(small_config(changes, folder)) for folder in ("one", "two")]
    for file in ("results.json", "metrics.jsonl"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    rows = json.loads((folders[0] / "results.json").read_text())["methods"]
    own = [row for row in rows if row["method"] not in ("base", "oppu")]
    if name in ("base", "oppu"):
        assert sorted(row["method"] for row in rows) == ["base", "oppu"]
    else:
        assert [row["method"] for row in own] == ["assembled" if name == "per-pcs" else name]
        assert own[0]["users"] == 3 and own[0]["loss"] > 0
