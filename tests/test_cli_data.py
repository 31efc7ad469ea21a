"""``perpcs data``: check, show and profiles, as a person calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_perpcs.cli import app

runner = CliRunner()
MOVIES = Path(__file__).parent / "lamp" / "lamp-2m"


@pytest.fixture
def words(tiny_folder) -> list[str]:
    """A run on six users of LaMP-2M, with the random little LM."""
    values = {
        "data.source": "lamp",
        "data.task": "lamp-2m",
        "data.path": MOVIES,
        "data.queries": 0,
        "lm.name": tiny_folder,
        "lm.max-length": 256,
        "roles.base": 2,
        "roles.candidates": 2,
        "roles.targets": 2,
        "sharers.count": 2,
        "sharers.min-history": 1,
    }
    return [f"{key}={value}" for key, value in values.items()]


def invoke(*args: object):
    return runner.invoke(app, ["data", *map(str, args)])


def test_check_tells_what_is_there_and_that_a_run_could_start(words):
    shown = invoke("check", *words)
    assert shown.exit_code == 0
    for part in ("lamp: lamp-2m", "2 base, 2 candidates, 2 targets", "a run could start"):
        assert part in shown.output


def test_check_as_json(words):
    found = json.loads(invoke("check", "--json", *words).stdout)
    questions = json.loads((MOVIES / "train_questions.json").read_text())
    assert found["users"] == 6
    assert found["queries"] == len(questions)
    assert found["problems"] == []
    tags = {label["label"]: label["history"] for label in found["labels"]}
    assert sum(tags.values()) == found["history"] == 18


def test_check_fails_if_a_run_could_not_start(words):
    shown = invoke("check", *words, "roles.base=20")
    assert shown.exit_code == 1
    assert "problem: roles.base + roles.candidates + roles.targets" in shown.output


def test_show_prints_prompts_with_what_is_retrieved_and_the_response(words):
    shown = invoke("show", "q-0", *words, "prompts.retrieve=1", "lm.max-length=400")
    assert shown.exit_code == 0, shown.stderr
    assert "3 × history item, 0 do not fit 400 tokens" in shown.output
    assert "### User History:\nDescription: " in shown.output
    assert "Description: An engineer builds a door to last week. Tag: sci-fi\n" in shown.output


def test_show_tells_what_does_not_fit(words):
    shown = invoke("show", "q-0", *words, "lm.max-length=16")
    assert "3 × history item, 3 do not fit 16 tokens" in shown.output
    assert "does not fit lm.max-length" in shown.output


def test_an_unknown_user_is_told_with_one_that_is_there(words):
    shown = invoke("show", "nobody", *words)
    assert shown.exit_code == 1
    assert "no user 'nobody'" in shown.stderr
    assert "'q-0'" in shown.stderr


def test_profiles_are_written_completed_and_used(words, tmp_path):
    out = tmp_path / "profiles.json"
    assert invoke("profiles", out, *words, "--max-new-tokens", 3).exit_code == 0
    profiles = json.loads(out.read_text())
    assert len(profiles) == 6
    some = dict(list(profiles.items())[:2]) | {"q-20": "likes dystopias"}
    out.write_text(json.dumps(some))
    assert invoke("profiles", out, *words, "--max-new-tokens", 3).exit_code == 0
    again = json.loads(out.read_text())
    assert again == profiles | some
    shown = invoke("show", "q-20", *words, f"prompts.profiles={out}", "lm.max-length=400")
    assert "### User Profile:\nlikes dystopias\n" in shown.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list; expected an object of texts"),
        ('{"q-0": 5}', "user 'q-0': 5 is not a text"),
        ("{", "is not JSON"),
        ("{}", "has no profile of user 'q-0'"),
    ],
)
def test_a_wrong_file_of_profiles_is_named(words, tmp_path, text, message):
    path = tmp_path / "profiles.json"
    path.write_text(text)
    shown = invoke("show", "q-0", *words, f"prompts.profiles={path}")
    assert shown.exit_code == 1
    assert message in shown.stderr
    assert str(path) in shown.stderr


def test_profiles_too_long_for_the_prompt_are_refused(words, tmp_path):
    shown = invoke("profiles", tmp_path / "p.json", *words, "--max-new-tokens", 200)
    assert shown.exit_code == 1
    assert "leave no room for the history in lm.max-length = 256" in shown.stderr
