"""The documentation does what it says."""

import re
from pathlib import Path

import pytest

from fl_perpcs.describe import config_reference

ROOT = Path(__file__).parents[1]


def test_the_config_reference_is_the_configs():
    assert (ROOT / "docs" / "config.md").read_text() == config_reference(), "run `make docs`"


@pytest.mark.parametrize(
    "page", [*ROOT.glob("docs/*.md"), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (page.parent / link).exists()]


@pytest.mark.e2e
def test_the_library_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/library.md", "exec"), {})
    assert "accuracy" in capsys.readouterr().out
