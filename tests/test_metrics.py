"""The metrics against LaMP's rules, written here once more with scikit-learn and rouge-score."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, mean_squared_error

from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import load_task, metrics, task_names

TAGS = load_task("movie-tagging").labels
STARS = ("1", "2", "3", "4", "5")

# Answers that are nearly right, and what LaMP makes of them.
TAGGED = [
    ("comedy", "comedy"),
    ("Comedy", "comedy"),  # another case is another answer
    (" comedy\n", "comedy"),
    ("comedy ", " comedy"),
    ("comedy.", "comedy"),
    ('"comedy"', "comedy"),
    ("dark comedy", "comedy"),
    ("comedy", "dark comedy"),
    ("", "violence"),
    ("true  story", "true story"),
    ("true story", "true story"),
    ("sci\u2011fi", "sci-fi"),  # a hyphen of another kind
    ("sci-fi", "sci-fi"),
    ("\u00a0action\u00a0", "action"),  # Python strips no-break spaces too
    ("no tag at all", "twist ending"),
    ("café", "classic"),
]
RATED = [
    ("5", "5"),
    ("4", "5"),
    ("1", "5"),
    ("5 stars", "5"),  # the end farther from the gold
    ("5 stars", "1"),
    ("", "2"),
    ("", "3"),  # as far from either: 5
    ("four", "4"),
    (" 3 ", "3"),
    ("3.5", "3"),
    ("4e0", "2"),
    ("٣", "1"),  # a digit to Python's float
    ("½", "1"),
    ('"2"', "2"),
    ("-7", "1"),
    ("1_0", "5"),
]
WRITTEN = [
    ("the same words", "the same words"),
    ("The Same, words!", "the same words"),
    ("", "a headline"),
    ("  spaces around  ", "spaces around"),
    ("words words words", "words"),
    ("stars", "star"),  # no stemming
    ("l\u2019été à Paris", "l'été a Paris"),
    ("“Quoted” title", '"Quoted" title'),
    ("用户 个性化", "用户"),  # nothing that the tokenizer keeps
    ("a b c d e", "e d c b a"),
    ("one-two three", "one two three"),
]


def lamp_classes(predictions, golds, labels):
    index = {label: number for number, label in enumerate(labels)}
    said = [index.get(text.strip(), -1) for text in predictions]
    true = [index.get(text.strip(), -1) for text in golds]
    accuracy = accuracy_score(true, said)
    numbers = list(range(len(labels)))
    return accuracy, f1_score(true, said, labels=numbers, average="macro", zero_division=0)


def lamp_ratings(predictions, golds):
    true = [float(gold) for gold in golds]
    said = []
    for text, gold in zip(predictions, true, strict=True):
        try:
            said.append(float(text.strip()))
        except ValueError:
            said.append(1.0 if abs(1 - gold) > abs(5 - gold) else 5.0)
    return mean_absolute_error(true, said), mean_squared_error(true, said) ** 0.5


def lamp_rouge(kind, predictions, golds):
    scorer = RougeScorer([kind], use_stemmer=False)
    pairs = zip(predictions, golds, strict=True)
    return np.mean([scorer.score(g.strip(), p.strip())[kind].fmeasure for p, g in pairs])


def same(name, predictions, golds, labels, expected):
    found = metrics.score(name, predictions, golds, labels)
    assert found == pytest.approx(expected, abs=1e-12, rel=0)


def test_tags_are_scored_by_lamps_rules():
    predictions, golds = zip(*TAGGED, strict=True)
    accuracy, f1 = lamp_classes(predictions, golds, TAGS)
    assert accuracy == 6 / len(TAGGED)
    same("accuracy", predictions, golds, TAGS, accuracy)
    same("f1", predictions, golds, TAGS, f1)


def test_ratings_are_scored_by_lamps_rules():
    predictions, golds = zip(*RATED, strict=True)
    mae, rmse = lamp_ratings(predictions, golds)
    same("mae", predictions, golds, STARS, mae)
    same("rmse", predictions, golds, STARS, rmse)
    assert [metrics.rating(p, g, STARS) for p, g in RATED[3:8]] == [1, 5, 5, 5, 1]


@pytest.mark.parametrize(("name", "kind"), [("rouge-1", "rouge1"), ("rouge-l", "rougeL")])
def test_texts_are_scored_by_lamps_rules(name, kind):
    predictions, golds = zip(*WRITTEN, strict=True)
    same(name, predictions, golds, (), lamp_rouge(kind, predictions, golds))
    for prediction, gold in WRITTEN:
        same(name, [prediction], [gold], (), lamp_rouge(kind, [prediction], [gold]))


def pairs(values):
    return st.lists(st.tuples(values, values), min_size=1, max_size=40)


@given(pairs(st.sampled_from(TAGS[:6])), st.sampled_from(["", "?", "Action"]))
def test_any_tags_are_scored_as_by_scikit_learn(answers, other):
    predictions, golds = zip(*answers, strict=True)
    predictions = [other if n % 5 == 4 else text for n, text in enumerate(predictions)]
    accuracy, f1 = lamp_classes(predictions, golds, TAGS)
    same("accuracy", predictions, golds, TAGS, accuracy)
    same("f1", predictions, golds, TAGS, f1)


@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from(STARS), st.floats(-9, 9).map(str), st.text(max_size=4)),
            st.sampled_from(STARS),
        ).filter(lambda pair: pair[0].strip().lstrip("+-").lower() not in ("nan", "inf")),
        min_size=1,
        max_size=40,
    )
)
def test_any_ratings_are_scored_as_by_scikit_learn(answers):
    predictions, golds = zip(*answers, strict=True)
    mae, rmse = lamp_ratings(predictions, golds)
    same("mae", predictions, golds, STARS, mae)
    same("rmse", predictions, golds, STARS, rmse)


@given(pairs(st.text(alphabet="ab c'é", max_size=12)))
def test_any_texts_are_scored_as_by_rouge_score(answers):
    predictions, golds = zip(*answers, strict=True)
    same("rouge-1", predictions, golds, (), lamp_rouge("rouge1", predictions, golds))
    same("rouge-l", predictions, golds, (), lamp_rouge("rougeL", predictions, golds))


@pytest.mark.parametrize("text", ["nan", "inf", "-Infinity"])
def test_a_rating_that_is_no_finite_number_is_unparsable(text):
    # LaMP's evaluator would take these as they are and report nan or inf.
    assert metrics.score("mae", [text], ["5"], STARS) == 4


def test_rouge_l_by_hand():
    # common subsequence "tool stars": precision 2/4, recall 2/3
    found = metrics.score("rouge-l", ["tool that finds stars"], ["tool for stars"])
    assert found == pytest.approx(4 / 7)


def test_f1_by_hand():
    # a: 2·1 / (1 said + 2 true), b: 2·1 / (2 + 1), c neither said nor true
    found = metrics.score("f1", ["a", "b", "b"], ["a", "a", "b"], ["a", "b", "c"])
    assert found == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)


def test_statistics_add_up():
    predictions, golds = zip(*TAGGED, strict=True)
    for name in ("accuracy", "f1", "rouge-1"):
        rows = metrics.statistics(name, predictions, golds, TAGS)
        assert len(rows) == len(TAGGED)
        found = metrics.METRICS[name].value(rows.sum(0), np.array(len(rows)))
        assert found == metrics.score(name, predictions, golds, TAGS)


def test_over_no_answers_there_is_no_score():
    assert math.isnan(metrics.score("accuracy", [], []))


def test_tasks_name_metrics_that_exist_and_which_way_is_better():
    for name in task_names():
        assert set(load_task(name).metrics) <= set(metrics.METRICS)
    lower = {name for name, metric in metrics.METRICS.items() if not metric.higher_is_better}
    assert lower == {"mae", "rmse"}


def test_a_metric_that_does_not_exist_or_lacks_labels_is_named():
    with pytest.raises(PerPcsError, match=r"'bleu'.*accuracy, f1"):
        metrics.score("bleu", ["a"], ["a"])
    with pytest.raises(PerPcsError, match="'f1' needs the task's labels"):
        metrics.score("f1", ["a"], ["a"])


def test_a_gold_that_is_no_number_is_named():
    with pytest.raises(PerPcsError, match="the gold 'five' is no number"):
        metrics.score("rmse", ["5"], ["five"], ["1", "2", "3", "4", "5"])
