"""A study through Flower and Ray, interrupted and resumed."""

import subprocess
import sys

import pytest
from real_runs import ROOT, SMALL

from fl_perpcs.runs import read_json

pytestmark = pytest.mark.e2e

STUDY = """
name = "small"
seeds = [0]
baseline = "published"
hubness = ["published"]
[methods."base LLM"]
"strategy.name" = "base"
[methods."OPPU"]
"strategy.name" = "oppu"
[methods."published"]
"strategy.name" = "per-pcs"
[common]
"""


def test_a_study_goes_on_where_it_stopped(tmp_path):
    common = "".join(f'"{key}" = {value}\n' for key, value in SMALL.items())
    (tmp_path / "study.toml").write_text(STUDY + common)
    command = [sys.executable, "-m", "simulations.compare", str(tmp_path / "study.toml")]
    command += ["--out", str(tmp_path / "out")]

    def compare() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "[4/4] seed-0/published" in compare()
    table = (tmp_path / "out" / "small.md").read_bytes()
    stopped = tmp_path / "out" / "seed-0" / "oppu"
    (stopped / "results.json").unlink()  # as if it had been killed before its end
    again = compare()
    assert "seed-0/oppu" in again and "seed-0/published" not in again
    assert (tmp_path / "out" / "small.md").read_bytes() == table
    pools = [
        read_json(tmp_path / "out" / "seed-0" / run / "pool" / "manifest.json")
        for run in ("pool", "published")
    ]
    assert pools[0] == pools[1]
    for figure in ("small-quality.png", "small-costs.png", "small-hubness.png"):
        assert (tmp_path / "out" / figure).stat().st_size > 5000
