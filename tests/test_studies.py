"""Studies: what a file says, which runs it makes, and how they are scored. No Flower, no Ray."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import typer
from test_federation import federation
from typer.testing import CliRunner

from fl_perpcs import server_app
from fl_perpcs.errors import PerPcsError
from fl_perpcs.runs import read_json, read_lines
from simulations import plan, running
from simulations.ablate import write_ablations
from simulations.communication import write_communication
from simulations.compare import write_comparison
from simulations.running import run_study, runs_of
from simulations.scoring import first_choices, score_study
from simulations.study import load_study
from simulations.tables import si_bytes

STUDIES = sorted((Path(__file__).parents[1] / "simulations" / "studies").glob("*.toml"))
METHODS = {
    "base LLM": {"strategy.name": "base"},
    "OPPU": {"strategy.name": "oppu"},
    "Published": {"strategy.name": "per-pcs"},
    "Rerank": {"rerank.items": 2},
    "With PAG": {"strategy.name": "pag"},
    "With RAG": {"strategy.name": "rag", "prompts.retrieve": 1},
    "More steps": {"adapter.steps": 3},
    "Fewer sharers": {"sharers.count": 1},
}


@pytest.fixture
def write_study(small_config, tmp_path):
    """Write a study of the small federation, with some keys changed."""

    def write(**changes) -> Path:
        common = {k: v for k, v in small_config().items() if k != "run.dir"}
        study = {
            "name": "small",
            "seeds": [0, 1],
            "baseline": "Published",
            "rivals": ["OPPU"],
            "hubness": ["Published", "Rerank"],
            "common": common,
            "methods": METHODS,
            **changes,
        }
        (tmp_path / "study.toml").write_text(tomli_w.dumps(study))
        return tmp_path / "study.toml"

    return write


@pytest.fixture
def launched(monkeypatch) -> list[Path]:
    """Run in this process; return the folders of the runs that were started."""
    folders: list[Path] = []

    def launch(values, show=True):
        folders.append(federation(values))

    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr(server_app, "write_report", lambda folder: None)
    return folders


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_here_can_be_run(path):
    study = load_study(path)
    assert study.base in study.methods and study.oppu in study.methods
    folders = [folder for folder, _ in runs_of(study, Path("/out"))]
    assert len(set(folders)) == len(folders) == len(study.seeds) * (1 + len(study.all_methods))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": "best"}, "'best' is none of the methods"),
        ({"hubness": ["best"]}, "'best' is none of the methods"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"name": "../x"}, "name: String should match pattern"),
        ({"metods": {}}, "metods: Extra inputs are not permitted"),
        ({"methods": {"Published": {"assembly.topk": 1}}}, "did you mean assembly.top-k"),
        ({"ablations": {"assembly.top-k": [1, 0]}}, "method 'assembly.top-k = 0'"),
        ({"config": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused(write_study, changes, told):
    with pytest.raises(PerPcsError, match=told):
        load_study(write_study(**{"hubness": [], "rivals": [], **changes}))


def test_what_is_no_study_is_refused(tmp_path):
    with pytest.raises(PerPcsError, match="does not exist"):
        load_study(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(PerPcsError, match="is not a TOML study"):
        load_study(tmp_path / "bad.toml")


def test_methods_share_the_adaptation_and_the_pool_that_they_leave_alone(write_study, tmp_path):
    study = load_study(write_study())
    runs = {f.name: values for f, values in runs_of(study, tmp_path) if f.parent.name == "seed-1"}
    pool = str(tmp_path / "seed-1" / "pool")
    for name in ("base-llm", "oppu", "published", "rerank", "fewer-sharers"):
        assert runs[name]["adaptation.adapter"] == f"{pool}/adaptation"
        assert runs[name]["sharers.pool"] == f"{pool}/pool"
    assert runs["more-steps"]["adaptation.mode"] == "load"
    assert "sharers.pool" not in runs["more-steps"] or not runs["more-steps"]["sharers.pool"]
    assert runs["with-rag"]["adaptation.mode"] == "federated"
    assert {values["seed"] for values in runs.values()} == {1}


def test_a_study_from_the_first_run_to_the_table(write_study, launched, tmp_path):
    path, out = write_study(), tmp_path / "out"
    study = load_study(path)
    run_study(study, out, lambda line: None)
    assert len(launched) == 2 * 9
    assert len(read_json(out / "seed-1" / "profiles.json")) == 11
    write_comparison(study, out)
    rows = {row["method"]: row for row in json.loads((out / "small.json").read_text())}
    assert list(rows) == list(METHODS)
    assert rows["Published"]["units"] == 2 * 3
    for metric, found in rows["Published"]["scores"].items():
        assert found["against"]["Published"] == {"difference": 0, "interval": [0, 0], "better": 0}
        assert 0 <= rows["OPPU"]["scores"][metric]["against"]["Published"]["better"] <= 6
        assert rows["base LLM"]["scores"][metric]["gain"] in (0, None)
        assert rows["OPPU"]["scores"][metric]["gain"] in (1, None)
        low, high = found["interval"]
        assert low <= found["value"] <= high
    # The loss over both seeds is that of all tokens together.
    reports = [
        row
        for seed in (0, 1)
        for row in read_lines(out / f"seed-{seed}" / "oppu" / "metrics.jsonl")
        if row["phase"] == "evaluate oppu"
    ]
    tokens = np.array([row["tokens"] for row in reports])
    loss = np.average([row["loss"] for row in reports], weights=tokens)
    assert rows["OPPU"]["scores"]["loss"]["value"] == pytest.approx(loss)
    assert rows["Rerank"]["costs"]["forward-examples"] > 0
    text = (out / "small.md").read_text()
    assert all(f"| {method} |" in text for method in METHODS)
    assert {p.name for p in out.glob("*.png")} == {
        f"small-{name}.png" for name in ("quality", "costs", "hubness")
    }
    for seed in first_choices(study, out, "Published"):
        assert sum(seed.values()) == pytest.approx(1)

    # Nothing is repeated, but what was interrupted.
    launched.clear()
    run_study(study, out, lambda line: None)
    assert launched == []
    (out / "seed-1" / "rerank" / "results.json").unlink()
    run_study(study, out, lambda line: None)
    assert [folder.name for folder in launched] == ["rerank"]
    write_comparison(study, out)
    assert (out / "small.md").read_text() == text

    # Another setting in the same folder is refused, not mixed in.
    changed = load_study(write_study(methods={**METHODS, "Rerank": {"rerank.items": 3}}))
    with pytest.raises(PerPcsError, match=r"rerank\.items = 2, but the study says 3"):
        run_study(changed, out, lambda line: None)


def test_ablations_take_the_baseline_where_it_has_the_value(write_study, launched, tmp_path):
    methods = {name: METHODS[name] for name in ("base LLM", "OPPU", "Published")}
    ablations = {"assembly.top-k": [1, 2], "sharers.selection": ["k-means", "random"]}
    path = write_study(methods=methods, ablations=ablations, seeds=[0], hubness=[])
    run_study(load_study(path), tmp_path / "out", lambda line: None)
    names = [folder.name for folder in launched]
    assert sorted(names) == sorted(
        [
            "pool",
            "base-llm",
            "oppu",
            "published",
            "assembly.top-k-=-1",
            "sharers.selection-=-random",
        ]
    )
    write_ablations(load_study(path), tmp_path / "out")
    found = read_json(tmp_path / "out" / "ablate.json")
    assert [row["method"] for row in found["assembly.top-k"]] == ["assembly.top-k = 1", "Published"]
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {
        "assembly.top-k.png",
        "sharers.selection.png",
    }


def test_a_missing_run_is_named(write_study, tmp_path):
    with pytest.raises(PerPcsError, match="holds no finished run"):
        score_study(load_study(write_study()), tmp_path / "out")


def test_what_methods_send_stands_beside_what_it_buys(write_study, launched, tmp_path):
    methods = {
        "base LLM": {"strategy.name": "base"},
        "OPPU": {"strategy.name": "oppu"},
        "Published": {"strategy.name": "per-pcs"},
        "Layerwise": {"exchange.protocol": "layerwise"},
        "Match": {"exchange.protocol": "server-match", "exchange.format": "int8"},
    }
    study = load_study(
        write_study(methods=methods, rivals=[], hubness=[], pareto=["Published", "Match"])
    )
    out = tmp_path / "out"
    run_study(study, out, lambda line: None)
    text = write_communication(study, out).read_text()
    rows = {row["method"]: row for row in json.loads((out / "communication.json").read_text())}
    assert list(rows) == [*methods]
    for row in rows.values():
        assert row["traffic"]["off"] == pytest.approx(0, abs=1e-12)
    traffic = {name: row["traffic"] for name, row in rows.items()}
    assert traffic["OPPU"]["down"] == traffic["base LLM"]["down"] == 0
    assert traffic["Match"]["down"] < traffic["Layerwise"]["down"]
    # Two layers of two stages: five round trips in place of one.
    trips = {name: t["round-trips"] for name, t in traffic.items()}
    assert trips["Layerwise"] - trips["Published"] == 4
    assert traffic["Published"]["up"] == 0 < traffic["Match"]["up"]
    assert all(t["wire"] > t["down"] for name, t in traffic.items() if name != "Match")
    same = [rows[name]["scores"]["loss"]["value"] for name in ("Published", "Layerwise")]
    assert same[0] == same[1]
    assert text.count("\n") == 2 + len(methods) and "| Match |" in text
    assert (out / "pareto.png").stat().st_size > 5000
    # A run from before there was a ledger has no row.
    (out / "seed-1" / "match" / "ledger.parquet").unlink()
    write_communication(study, out)
    assert "| Match |" not in (out / "communication.md").read_text()


def test_a_run_is_done_whatever_its_window_was(write_study, launched, tmp_path):
    study = load_study(write_study(methods={"Published": {}}, rivals=[], hubness=[], seeds=[0]))
    run_study(study, tmp_path / "out", lambda line: None)
    count = len(launched)
    other = study.model_copy(update={"common": {**study.common, "run.window": 3}})
    run_study(other, tmp_path / "out", lambda line: None)
    assert len(launched) == count
    other = study.model_copy(update={"common": {**study.common, "assembly.top-k": 1}})
    with pytest.raises(PerPcsError, match=r"assembly\.top-k = 2, but the study says 1"):
        run_study(other, tmp_path / "out", lambda line: None)


def test_a_plan_is_made_without_any_run(tmp_path):
    done = CliRunner().invoke(_plan(), ["--out", str(tmp_path), "--history", "16"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "plan.md").read_text()
    assert "| broadcast | 1 | 1.78 GB | 891 MB | 446 MB |" in text
    assert "Llama-3.1-70B" in text and "10 Gbit/s" in text
    assert (tmp_path / "plan.png").stat().st_size > 5000


def _plan() -> typer.Typer:
    app = typer.Typer()
    app.command()(plan.main)
    return app


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1000 kB"),
        (12_345, "12.3 kB"),
        (1.785e9, "1.78 GB"),
        (3e15, "3000 TB"),
    ],
)
def test_bytes_are_told_with_three_digits(count, told):
    assert si_bytes(count) == told
