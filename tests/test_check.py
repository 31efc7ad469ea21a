"""``check_data``: every figure counted by hand."""

import json

import pytest

from fl_perpcs.config import load_config
from fl_perpcs.data.check import Spread, check_data

ROWS = [
    # user, input, output, in time order; the last of each user is its query
    ("ann", "a slow film", "comedy"),
    ("ann", "a slow film", "comedy"),  # a duplicate
    ("ann", "A Boxer wins", "action"),  # gives the query away
    ("ann", "two words", ""),  # no output: dropped
    ("ann", "a boxer wins", "action"),
    ("bob", "a slow film", "comedy"),  # shared with ann
    ("bob", "one", "romance"),
    ("bob", "last of bob", "romance"),
    ("cem", "only query of cem", "classic"),
    ("dee", "x", "action"),
    ("dee", "y", "action"),
]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = ("user", "input", "output")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in ROWS))
    values = {
        "data.source": "table",
        "data.task": "movie-tagging",
        "data.path": str(path),
        "data.queries": 1,
        "roles.base": 0,
        "roles.candidates": 2,
        "roles.targets": 1,
        "adaptation.mode": "none",
        "sharers.count": 1,
        "sharers.min-history": 1,
    }
    return lambda **changes: load_config({**values, **changes})


def test_every_figure(config):
    found = check_data(config())
    assert (found.source, found.task) == ("table", "movie-tagging")
    assert (found.users, found.left_out, found.with_queries) == (3, 1, 3)  # cem has no history
    assert (found.history, found.queries) == (2 + 2 + 1, 3)
    assert found.history_per_user == Spread(min=1, median=2, p95=2, max=2)
    assert found.queries_per_user == Spread(1, 1, 1, 1)
    # Inputs in words: ann 3 3 3, bob 3 1 3, dee 1 1.
    assert found.input_words == Spread(min=1, median=3, p95=3, max=3)
    assert (found.leaks, found.users_with_leaks, found.leaks_are) == (1, 1, "remove")
    assert (found.duplicates, found.shared, found.dropped) == (1, 1, 1)
    assert (found.plain_text, found.queries_without_input, found.strange_outputs) == (0, 0, 0)
    assert (found.empty_histories, found.one_item_histories) == (0, 1)
    counts = {row.label: (row.history, row.queries) for row in found.labels if row.history}
    assert counts == {"comedy": (3, 0), "romance": (1, 1), "action": (1, 2)} | {}
    assert found.roles == {"base": 0, "candidates": 2, "targets": 1}
    assert found.problems == []
    text = "\n".join(found.warnings)
    for part in ("1 users have too few items", "1 items have no output", "1 history items give"):
        assert part in text


def test_leaks_that_stop_and_roles_that_cannot_be_filled_are_problems(config):
    (problem,) = check_data(config(**{"data.leaks": "stop"})).problems
    assert problem.startswith("1 history items of 1 users give their queries away")
    (problem,) = check_data(config(**{"roles.candidates": 3})).problems
    assert "= 0 + 3 + 1 = 4 users, but there are 3" in problem
    kept = check_data(config(**{"data.leaks": "keep"}))
    assert (kept.history, kept.problems) == (6, [])


def test_too_few_sharers_with_enough_history_are_a_warning_or_a_problem(config):
    found = check_data(config(**{"sharers.min-history": 2, "sharers.count": 2}))
    assert found.problems or any("fewer sharers" in warning for warning in found.warnings)


def test_synthetic_users():
    found = check_data(load_config({}))
    assert found.users == 54
    assert found.queries == 54 * 20
    assert found.dropped is None
    assert {row.known for row in found.labels} == {True}
    assert found.problems == []
