"""The documentation does what it says."""

import re
from pathlib import Path

import pytest

from fl_perpcs.data import SOURCES
from fl_perpcs.describe import config_reference
from fl_perpcs.tasks import load_task, task_names

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


def test_the_task_in_the_docs_is_one(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    (tmp_path / "task.toml").write_text(text)
    assert load_task(str(tmp_path / "task.toml")).name == "support-tone"


def test_the_docs_name_every_task_and_source():
    text = (ROOT / "docs/data.md").read_text()
    for name in (*task_names(), *SOURCES):
        assert f"`{name}`" in text
