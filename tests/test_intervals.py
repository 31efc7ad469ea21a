import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.intervals import draw_users, interval
from fl_perpcs.tasks.metrics import METRICS, score, statistics

MEAN = METRICS["accuracy"].value


def test_each_draw_is_of_as_many_users_as_there_are():
    draws = draw_users(7, 100, seed=3)
    assert draws.shape == (100, 7)
    assert (draws.sum(1) == 7).all()
    assert len({tuple(row) for row in draws.tolist()}) > 50
    assert draw_users(0, 5, seed=0).shape == (5, 0)


def test_the_same_seed_draws_the_same_users():
    assert (draw_users(7, 100, seed=3) == draw_users(7, 100, seed=3)).all()
    assert (draw_users(7, 100, seed=3) != draw_users(7, 100, seed=4)).any()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 9))
def test_the_interval_of_one_user_has_no_width(values, seed):
    sums, counts = np.array([[sum(values)]]), np.array([len(values)])
    low, high = interval(MEAN, sums, counts, draw_users(1, 20, seed))
    assert low == high == sums[0, 0] / len(values)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=2, max_size=20),
    st.integers(0, 9),
)
def test_an_interval_lies_within_what_users_have(users, seed):
    hits = np.array([[float(min(pair))] for pair in users])
    counts = np.array([pair[1] for pair in users])
    low, high = interval(MEAN, hits, counts, draw_users(len(users), 200, seed))
    each = hits[:, 0] / counts
    assert each.min() - 1e-12 <= low <= high <= each.max() + 1e-12


def test_the_ends_are_percentiles_of_the_metric_over_the_drawn_users_answers():
    rng = np.random.default_rng(0)
    labels = ["a", "b", "c"]
    golds = [rng.choice(labels, size=n).tolist() for n in (5, 1, 9, 4)]
    said = [[g if rng.random() < 0.6 else "b" for g in gold] for gold in golds]
    both = zip(said, golds, strict=True)
    sums = np.array([statistics("f1", p, g, labels).sum(0) for p, g in both])
    draws = draw_users(4, 60, seed=1)
    expected = []
    for draw in draws:
        chosen = np.repeat(range(4), draw)
        drawn = [[text for i in chosen for text in texts[i]] for texts in (said, golds)]
        expected.append(score("f1", *drawn, labels))
    counts = np.array([len(gold) for gold in golds])
    found = interval(METRICS["f1"].value, sums, counts, draws)
    assert found == pytest.approx(np.percentile(expected, [2.5, 97.5]).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ["accuracy", "rmse"])
def test_intervals_hold_the_truth_about_as_often_as_they_say(name):
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        # Users differ: half of the spread is between them, so answers are no sample of their own.
        own = rng.beta(4, 4, size=60)
        sums = rng.binomial(10, own)[:, None].astype(float)
        value = METRICS[name].value
        low, high = interval(value, sums, np.full(60, 10), draw_users(60, 400, trial))
        held += low <= (0.5 if name == "accuracy" else 0.5**0.5) <= high
    assert 0.9 <= held / 200 <= 0.99


def test_nothing_to_count_has_no_interval():
    none = np.zeros((3, 1)), np.zeros(3)
    assert interval(MEAN, *none, draw_users(3, 50, 0)) is None
    assert interval(MEAN, np.ones((3, 1)), np.ones(3), draw_users(3, 0, 0)) is None
    assert interval(MEAN, np.full((3, 1), np.inf), np.ones(3), draw_users(3, 50, 0)) is None


def test_draws_of_users_without_answers_are_left_out():
    sums, counts = np.array([[3.0], [0.0]]), np.array([4, 0])
    assert interval(MEAN, sums, counts, draw_users(2, 50, 0)) == [0.75, 0.75]
