"""The package that docs/strategies.md builds, installed from a folder of its own, in real runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import BIN, ROOT, SMALL

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Where the tutorial's package is installed: a folder that only its runs see."""
    text = (ROOT / "docs/strategies.md").read_text()
    blocks = re.findall(r"`([\w.]+)`\n\n```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["pyproject.toml", "perpcs_median.py"]
    assert sum(code.count("\n") for _, code in blocks) < 60
    project, site = (tmp_path_factory.mktemp(name) for name in ("project", "site"))
    for name, code in blocks:
        (project / name).write_text(code)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(site), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    return site


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"strategy.name": "median"}, "median"),
        ({"strategy.name": "perpcs_median:median"}, "median"),
        (
            {
                "assembly.merge": "heaviest",
                "assembly.scorer": "dot",
                "sharers.selection": "first",
            },
            "assembled",
        ),
    ],
    ids=["strategy", "import path", "merge, scorer and selection"],
)
def test_the_tutorials_package_runs(changes, method, installed, tmp_path):
    values = {**SMALL, **changes, "run.dir": str(tmp_path / "run"), "evaluation.references": ""}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    done = subprocess.run(
        [BIN / "perpcs", "run", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["method"] for row in results["methods"]] == [method]
    if "sharers.selection" in changes:
        manifest = json.loads((tmp_path / "run" / "pool" / "manifest.json").read_text())
        first = sorted(results["roles"]["candidates"])[:4]
        assert [entry["sharer"] for entry in manifest["sharers"]] == first


def test_without_the_package_the_name_is_unknown(tmp_path):
    done = subprocess.run(
        [BIN / "perpcs", "config", 'assembly.merge="heaviest"'], capture_output=True, text=True
    )
    assert done.returncode
    assert "assembly.merge = 'heaviest' is not known; use one of factor, delta" in done.stderr
