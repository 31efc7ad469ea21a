import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_perpcs import __version__
from fl_perpcs.cli import app, read_words
from fl_perpcs.config import ConfigError, load_config, read_config_file
from fl_perpcs.errors import PerPcsError
from fl_perpcs.runs import Run

ROOT = Path(__file__).parent.parent
runner = CliRunner()


def test_the_command_line_loads_without_heavy_libraries() -> None:
    code = (
        "import sys, fl_perpcs.cli;"
        "heavy = {'torch', 'flwr', 'ray', 'transformers', 'pydantic'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_and_version() -> None:
    shown = runner.invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in ("run", "fetch", "config", "report", "results", "export"):
        assert command in shown.output
    assert runner.invoke(app, ["--version"]).output == f"perpcs {__version__}\n"


def test_words_are_toml_scalars_or_plain_strings() -> None:
    words = ["lm.name=tiny", "seed=3", "lora.alpha=4.5", "evaluation.generate=false"]
    words += ['run.name="a b"', "data.folder=", "evaluation.references=base,oppu", "run.dir=[x]"]
    assert read_words(words) == {
        "lm.name": "tiny",
        "seed": 3,
        "lora.alpha": 4.5,
        "evaluation.generate": False,
        "run.name": "a b",
        "data.folder": "",
        "evaluation.references": "base,oppu",
        "run.dir": "[x]",
    }


def test_single_keys_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seed = 1\n[lora]\nrank = 4\n")
    assert read_words([str(file), "seed=2"]) == {"seed": 2, "lora.rank": 4}


def test_a_config_by_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.toml").write_text("seed = 7\n")
    monkeypatch.chdir(tmp_path)
    assert read_words(["mine"]) == {"seed": 7}
    with pytest.raises(ConfigError, match="mine"):
        read_words(["yours"])


def test_words_that_are_no_keys_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        read_words(["seed=1", "first", "=2"])
    assert len(error.value.problems) == 2


def test_config_prints_what_can_be_read_back(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["config", "assembly.top-k=5"])
    assert shown.exit_code == 0
    file = tmp_path / "config.toml"
    file.write_text(shown.output)
    assert load_config(read_config_file(file)).assembly.top_k == 5


@pytest.mark.parametrize("command", ["config", "run"])
def test_a_bad_config_exits_2_with_every_problem(command: str) -> None:
    shown = runner.invoke(app, [command, "lora.rnk=4", "roles.base=1"])
    assert shown.exit_code == 2
    assert "did you mean lora.rank?" in shown.stderr
    assert "roles.base = 1" in shown.stderr
    assert "Traceback" not in shown.output


def test_a_failed_run_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: object) -> Run:
        raise PerPcsError("the run failed: user u3 has no history")

    monkeypatch.setattr("fl_perpcs.launcher.launch", fail)
    shown = runner.invoke(app, ["run"])
    assert shown.exit_code == 1
    assert shown.stderr == "perpcs: the run failed: user u3 has no history\n"


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(values: object) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_perpcs.launcher.launch", interrupt)
    assert runner.invoke(app, ["run"]).exit_code == 130


def test_a_completed_run_shows_results_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_results(tmp_path)
    (tmp_path / "report.html").write_text("")
    monkeypatch.setattr("fl_perpcs.launcher.launch", lambda values: Run(tmp_path))
    shown = runner.invoke(app, ["run", "seed=1"])
    assert shown.exit_code == 0
    assert "0.812" in shown.output
    assert f"report: {tmp_path / 'report.html'}" in shown.output


def test_results(tmp_path: Path) -> None:
    _write_results(tmp_path)
    shown = runner.invoke(app, ["results", str(tmp_path)])
    assert shown.exit_code == 0
    assert "assembled" in shown.output
    assert "66" in shown.output
    assert shown.output.index("accuracy") < shown.output.index("f1")


def test_results_of_a_folder_without_any(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["results", str(tmp_path)])
    assert shown.exit_code == 1
    assert "results.json does not exist" in shown.stderr


def test_fetch_names_what_it_knows() -> None:
    shown = runner.invoke(app, ["fetch", "gpt"])
    assert shown.exit_code == 1
    assert "expected one of smollm2, minilm, debian-synopsis, lamp" in shown.stderr


def _write_results(folder: Path) -> None:
    def row(method: str, accuracy: float, gain: float | None) -> dict[str, object]:
        metrics = {"f1": accuracy / 2, "accuracy": accuracy}
        counts = {"users": 8, "queries": 160, "loss": 1.25}
        return {"method": method, **counts, "metrics": metrics, "gain": gain}

    rows = [row("base", 0.5, None), row("assembled", 0.812, 0.66)]
    results = {"methods": rows, "main_metric": "accuracy"}
    (folder / "results.json").write_text(json.dumps(results))
