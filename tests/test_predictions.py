import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from fl_perpcs.cli import app
from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.predictions import export_predictions
from fl_perpcs.tasks.metrics import score

runner = CliRunner()
ROWS = [
    {"user": "u1", "query": "110", "gold": "comedy", "prediction": "comedy"},
    {"user": "u1", "query": "111", "gold": "dystopia", "prediction": ""},
    {"user": "u2", "query": "205", "gold": "true story", "prediction": "“Vérité”\n"},
]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(rows: list[dict] = ROWS, **results: str) -> Path:
        folder = tmp_path / "run"
        (folder / "predictions").mkdir(parents=True)
        (folder / "config.toml").write_text(tomli_w.dumps(Config().model_dump(by_alias=True)))
        found = {"task": "movie-tagging", "lamp_id": "", **results}
        (folder / "results.json").write_text(json.dumps(found))
        for method in ("base", "assembled"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "predictions" / f"{method}.jsonl").write_text(text)
        return folder

    return make


def read(out: Path) -> tuple[dict, dict]:
    names = ("predictions.json", "golds.json")
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    predictions, golds = (json.loads((out / name).read_text("utf-8")) for name in names)
    return predictions, golds


def test_files_are_what_lamps_evaluator_reads(make_run, tmp_path):
    assert export_predictions(make_run(lamp_id="LaMP_2"), "assembled", tmp_path / "out") is False
    predictions, golds = read(tmp_path / "out")
    # Ids are the queries' own, each once, and the same in both files.
    assert predictions == {
        "task": "LaMP_2",
        "golds": [{"id": row["query"], "output": row["prediction"]} for row in ROWS],
    }
    assert golds == {
        "task": "LaMP_2",
        "golds": [{"id": row["query"], "output": row["gold"]} for row in ROWS],
    }
    by_id = {gold["id"]: gold["output"] for gold in golds["golds"]}
    pairs = [(answer["output"], by_id[answer["id"]]) for answer in predictions["golds"]]
    assert score("accuracy", *zip(*pairs, strict=True)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("results", "task_id", "expected"),
    [
        ({}, "", "movie-tagging"),
        ({"lamp_id": "LaMP_2"}, "", "LaMP_2"),
        ({"lamp_id": "LaMP_2"}, "LaMP_2M", "LaMP_2M"),
    ],
)
def test_the_task_goes_by_its_lamp_id_unless_named(make_run, tmp_path, results, task_id, expected):
    export_predictions(make_run(**results), "base", tmp_path / "out", task_id)
    assert {file["task"] for file in read(tmp_path / "out")} == {expected}


def test_ids_that_users_share_get_the_user_before_them(make_run, tmp_path):
    rows = [row | {"query": query} for row, query in zip(ROWS, ("0", "1", "0"), strict=True)]
    folder = make_run(rows)
    shown = runner.invoke(app, ["predictions", str(folder), "base", str(tmp_path / "out")])
    assert shown.exit_code == 0
    assert shown.stdout == f"{tmp_path / 'out'}\n"
    assert "written as user/id" in shown.stderr
    for file in read(tmp_path / "out"):
        assert [answer["id"] for answer in file["golds"]] == ["u1/0", "u1/1", "u2/0"]


def test_the_command_says_nothing_else_where_ids_differ(make_run, tmp_path):
    words = ["predictions", str(make_run()), "base", str(tmp_path / "deep" / "out")]
    shown = runner.invoke(app, [*words, "--task-id", "LaMP_2M"])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert read(tmp_path / "deep" / "out")[0]["task"] == "LaMP_2M"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_cannot_be_exported_is_told(make_run, tmp_path):
    folder, out = make_run(), tmp_path / "out"
    with pytest.raises(PerPcsError, match="no predictions by 'oppu'; it has assembled, base"):
        export_predictions(folder, "oppu", out)
    with pytest.raises(PerPcsError, match="exists; name a new folder"):
        export_predictions(folder, "base", folder)
    with pytest.raises(PerPcsError, match="is not a run folder"):
        export_predictions(tmp_path / "nowhere", "base", out)
    (tmp_path / "file").write_text("")
    with pytest.raises(PerPcsError, match="cannot be written"):
        export_predictions(folder, "base", tmp_path / "file" / "out")
    (folder / "results.json").unlink()
    with pytest.raises(PerPcsError, match="did not get that far"):
        export_predictions(folder, "base", out)
    assert not out.exists()


def test_a_run_without_answers_has_nothing_to_export(make_run, tmp_path):
    rows = [{key: row[key] for key in ("user", "query", "gold")} for row in ROWS]
    with pytest.raises(PerPcsError, match=r"no answers by 'base'.*evaluation\.answers"):
        export_predictions(make_run(rows), "base", tmp_path / "out")


def test_a_query_that_is_there_twice_is_told(make_run, tmp_path):
    with pytest.raises(PerPcsError, match="two queries of one id, 'u1/110'"):
        export_predictions(make_run([*ROWS, ROWS[0]]), "base", tmp_path / "out")
