"""The protocols through Flower and Ray: the same result, and a ledger that the formula tells."""

import subprocess
from pathlib import Path

import pytest
from real_runs import BIN, ROOT, SMALL

from fl_perpcs.ledger import read_ledger
from fl_perpcs.runs import open_run
from simulations.traffic import PARTS, expected, facts_of, measured

pytestmark = pytest.mark.e2e

QUICK = {**SMALL, "evaluation.references": "", "run.report": False}


def run(folder: Path, **changes: object) -> Path:
    values = {**QUICK, **changes, "run.dir": folder}
    words = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items()]
    command = [str(BIN / "perpcs"), "run", "demo", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_layerwise_in_int8_is_a_broadcast_in_int8_and_the_formula_tells_both(tmp_path):
    first = run(
        tmp_path / "broadcast", **{"exchange.format": "int8", "exchange.by-reference": True}
    )
    borrowed = {
        "sharers.pool": first / "pool",
        "adaptation.mode": "load",
        "adaptation.adapter": first / "adaptation",
        "exchange.format": "int8",
    }
    second = run(tmp_path / "layerwise", **borrowed, **{"exchange.protocol": "layerwise"})
    for name in ("recipes.json", "predictions/assembled.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    for folder in (first, second):
        found = measured(read_ledger(folder))
        told = expected(open_run(folder)[1], facts_of(folder))
        for part in PARTS:
            assert (found[part].down, found[part].up) == (told[part].down, told[part].up)
