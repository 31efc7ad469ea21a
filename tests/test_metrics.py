import pytest
from rouge_score.rouge_scorer import RougeScorer

from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import metrics
from fl_perpcs.tasks.task import DEBIAN_SYNOPSIS, MOVIE_TAGGING


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [("comedy", "comedy", 1.0), (" Comedy\n", "comedy", 1.0), ("dark comedy", "comedy", 0.0)],
)
def test_accuracy_ignores_case_and_spaces_around(prediction, gold, expected):
    assert metrics.score("accuracy", prediction, gold) == expected


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("tool that reads stars", "tools for reading stars"),
        ("library for stars", "tool to paint rivers"),
        ("a b c a", "a c"),
        ("", "tool"),
        ("same words here", "same words here"),
    ],
)
def test_rouge_l_is_that_of_the_library(prediction, gold):
    reference = RougeScorer(["rougeL"], use_stemmer=True).score(gold, prediction)["rougeL"]
    assert metrics.score("rouge-l", prediction, gold) == reference.fmeasure


def test_rouge_l_by_hand():
    # common subsequence "tool stars": precision 2/4, recall 2/3
    assert metrics.rouge_l("tool that finds stars", "tool for stars") == pytest.approx(4 / 7)


def test_tasks_name_metrics_that_exist():
    for task in (MOVIE_TAGGING, DEBIAN_SYNOPSIS):
        assert set(task.metrics) <= set(metrics.METRICS)


def test_unknown_metric():
    with pytest.raises(PerPcsError, match=r"'bleu'.*accuracy, rouge-l"):
        metrics.score("bleu", "a", "a")
