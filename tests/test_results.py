import json
import random

import pytest
from typer.testing import CliRunner

from fl_perpcs.cli import app
from fl_perpcs.results import lower_is_better, main_metric, result_table, titled
from fl_perpcs.tasks import load_task
from fl_perpcs.tasks.metrics import score

runner = CliRunner()
TAGS, STARS = load_task("movie-tagging"), load_task("lamp-3")
USERS = {"anna": 7, "bo": 1, "cem": 12}


def answers_of(seed: int, skill: float, task=TAGS) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for user, queries in USERS.items():
        for query in range(queries):
            gold = rng.choice(task.labels[:4])
            said = gold if rng.random() < skill else rng.choice([*task.labels, "?"])
            rows.append({"user": user, "query": str(query), "gold": gold, "prediction": said})
    return rows


def reports_of(method: str, loss: float, **more) -> list[dict]:
    return [
        {
            "phase": f"evaluate {method}",
            "user": user,
            "loss": loss + queries / 10,
            "tokens": 2 * queries,
            "queries": queries,
            **more,
        }
        for user, queries in USERS.items()
    ]


SHARE = {"phase": "share", "user": "sharer", "num-examples": 3}
REPORTS = [SHARE, *reports_of("base", 2.0), *reports_of("assembled", 1.4), *reports_of("oppu", 1.0)]


def table_of(task=TAGS, **options):
    skills = {"base": 0.2, "assembled": 0.5, "oppu": 0.9}
    answers = {m: answers_of(n, skill, task) for n, (m, skill) in enumerate(skills.items())}
    return answers, result_table(REPORTS, answers, task, **options)


@pytest.mark.parametrize("task", [TAGS, STARS], ids=lambda task: task.name)
def test_metrics_are_lamps_over_all_answers_and_over_each_users(task):
    answers, table = table_of(task)
    assert [row["method"] for row in table] == ["base", "assembled", "oppu"]
    for row in table:
        own = answers[row["method"]]
        assert (row["users"], row["queries"], row["dropped"]) == (3, 20, 0)
        assert list(row["metrics"]) == list(task.metrics)
        for name in task.metrics:

            def expected(rows, name=name):
                predictions = [r["prediction"] for r in rows]
                return score(name, predictions, [r["gold"] for r in rows], task.labels)

            assert row["metrics"][name] == pytest.approx(expected(own), abs=1e-12)
            for user in USERS:
                value = row["by_user"][user][name]
                theirs = [r for r in own if r["user"] == user]
                assert value == pytest.approx(expected(theirs), abs=1e-12)


def test_the_loss_is_over_all_tokens():
    _, (base, *_) = table_of()
    assert base["loss"] == pytest.approx((2.7 * 14 + 2.1 * 2 + 3.2 * 24) / 40)
    losses = {user: own["loss"] for user, own in base["by_user"].items()}
    assert losses == pytest.approx({"anna": 2.7, "bo": 2.1, "cem": 3.2})


@pytest.mark.parametrize("task", [TAGS, STARS], ids=lambda task: task.name)
def test_intervals_hold_the_value_and_a_seed_repeats_them(task):
    _, table = table_of(task, resamples=500, seed=5)
    for row in table:
        assert row["intervals"].keys() == {*task.metrics, "loss"}
        for name, (low, high) in row["intervals"].items():
            value = row["loss"] if name == "loss" else row["metrics"][name]
            # F1 over few of the users lacks labels that others have, so it may be biased.
            assert low <= high
            assert name == "f1" or low <= value <= high
    assert json.dumps(table_of(task, resamples=500, seed=5)[1]) == json.dumps(table)
    assert all(row["intervals"] == {} for row in table_of(task)[1])


def test_methods_share_the_draws():
    answers = dict.fromkeys(("base", "oppu"), answers_of(0, 0.5))
    base, _, oppu = result_table(REPORTS, answers, TAGS, resamples=50, seed=0)
    assert base["intervals"]["accuracy"] == oppu["intervals"]["accuracy"]


@pytest.mark.parametrize("task", [TAGS, STARS], ids=lambda task: task.name)
def test_gains_are_shares_of_oppus_whichever_way_is_better(task):
    _, table = table_of(task)
    values = [row["metrics"][task.metrics[0]] for row in table]
    gains = [row["gain"] for row in table]
    assert gains[0] == 0 and gains[2] == 1
    assert 0 < gains[1] < 1
    assert gains[1] == pytest.approx((values[1] - values[0]) / (values[2] - values[0]))
    assert (values[2] > values[0]) is (task is TAGS)


def test_without_answers_the_loss_is_the_measure():
    unanswered = [{k: v for k, v in r.items() if k != "prediction"} for r in answers_of(0, 0.5)]
    for answers in ({}, {"base": unanswered}):
        table = result_table(REPORTS, answers, TAGS, resamples=20)
        assert main_metric(table, TAGS) == "loss"
        assert [row["metrics"] for row in table] == [{}, {}, {}]
        assert table[0]["intervals"].keys() == {"loss"}
        assert table[1]["gain"] == pytest.approx(0.6)


def test_what_cannot_be_told_is_left_out_and_never_nan():
    rows = reports_of("base", 0.0, dropped=2) + reports_of("oppu", float("inf"))
    rows[0] |= {"loss": 0.0, "tokens": 0}  # none of anna's queries fits
    answered = [row for row in answers_of(0, 0.5) if row["user"] != "bo"]
    table = result_table(rows, {"base": answered}, TAGS, resamples=50)
    text = json.dumps(table, allow_nan=False)
    assert "NaN" not in text and "Infinity" not in text
    base, oppu = table
    assert base["dropped"] == 6
    assert "loss" not in base["by_user"]["anna"] and "accuracy" in base["by_user"]["anna"]
    assert base["by_user"]["bo"].keys() == {"loss"}
    assert oppu["loss"] is None and oppu["gain"] is None
    silent = [row | {"tokens": 0} for row in reports_of("base", 0.0)]
    assert result_table(silent, {}, TAGS)[0]["loss"] is None


def test_nothing_evaluated_is_an_empty_table():
    assert result_table([SHARE], {}, TAGS, resamples=10) == []


def test_which_way_is_better():
    lower = [n for n in ("loss", "accuracy", "mae", "rmse", "rouge-1", "own") if lower_is_better(n)]
    assert lower == ["loss", "mae", "rmse"]
    assert [titled("mae"), titled("f1")] == ["mae ↓", "f1"]


def test_the_printed_table_has_intervals_arrows_and_the_way_of_answering(tmp_path):
    _, table = table_of(STARS, resamples=50)
    found = {"title": "product rating", "answers": "rank", "main_metric": "mae", "methods": table}
    (tmp_path / "results.json").write_text(json.dumps(found))
    shown = runner.invoke(app, ["results", str(tmp_path)]).output
    assert f"{tmp_path.name} · product rating · labels ranked by likelihood" in shown
    low, high = table[1]["intervals"]["mae"]
    assert f"{table[1]['metrics']['mae']:.3f} [{low:.3f}, {high:.3f}]" in shown
    assert "mae ↓" in shown and "rmse ↓" in shown and "loss ↓" in shown
    assert shown.index("mae") < shown.index("rmse")
    assert "3 users; 20 queries; [low, high]: 95 % bootstrap interval over users" in shown
    assert "dropped" not in shown


def test_dropped_queries_are_printed_once_or_for_each_method(tmp_path):
    _, table = table_of()

    def shown(*dropped: int) -> str:
        rows = [row | {"dropped": n} for row, n in zip(table, dropped, strict=True)]
        (tmp_path / "results.json").write_text(json.dumps({"methods": rows}))
        return runner.invoke(app, ["results", str(tmp_path)]).output

    assert "3 users; 20 queries; 4 dropped" in shown(4, 4, 4)
    assert "│ dropped" in shown(4, 0, 4) or "┃ dropped" in shown(4, 0, 4)
    assert "bootstrap" not in shown(0, 0, 0)
