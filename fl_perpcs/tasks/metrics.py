"""Metrics as LaMP's own evaluator computes them, over any set of answers.

Each answer gives a few numbers, these add up, and the metric is a function of the sums. So one
definition serves a user, all users, and a bootstrap over users, which only re-weights them.

References
----------
Salemi et al., "LaMP: When Large Language Models Meet Personalization", ACL 2024.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fl_perpcs.errors import PerPcsError

Labels = Sequence[str]


@dataclass(frozen=True)
class Metric:
    """A metric of answers against gold outputs.

    Attributes
    ----------
    statistics : callable
        (prediction, gold, labels) to a fixed number of floats.
    value : callable
        (sums of shape (..., statistics), numbers of answers of shape (...)) to the metric, (...).
    higher_is_better : bool
    needs_labels : bool
        Whether the task must have labels.
    """

    statistics: Callable[[str, str, Labels], tuple[float, ...]]
    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    higher_is_better: bool = True
    needs_labels: bool = False


def _mean(sums: np.ndarray, answers: np.ndarray) -> np.ndarray:
    return sums[..., 0] / np.maximum(answers, 1)


def _root_mean(sums: np.ndarray, answers: np.ndarray) -> np.ndarray:
    return np.sqrt(_mean(sums, answers))


def _exact(prediction: str, gold: str, labels: Labels) -> tuple[float, ...]:
    """Compare the texts, spaces around them apart; case counts, as in LaMP."""
    return (float(prediction.strip() == gold.strip()),)


def _confusion(prediction: str, gold: str, labels: Labels) -> tuple[float, ...]:
    """Count for each label a true positive, a prediction and a gold."""
    prediction, gold = prediction.strip(), gold.strip()
    hits = [float(prediction == gold == label) for label in labels]
    said = [float(prediction == label) for label in labels]
    true = [float(gold == label) for label in labels]
    return (*hits, *said, *true)


def _macro_f1(sums: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """F1 averaged over all labels; 0 for a label that is neither said nor true."""
    hits, said, true = np.split(sums, 3, axis=-1)
    either = said + true
    return np.divide(2 * hits, either, out=np.zeros_like(hits), where=either > 0).mean(-1)


def rating(prediction: str, gold: str, labels: Labels) -> float:
    """Read a rating; one that is no number is the end of the scale farther from the gold.

    LaMP's rule, for its scale of 1 to 5: unparsable answers count 1 if the gold is nearer to 5,
    else 5. "5 stars" is unparsable. Here "nan" and "inf" are too.

    Raises
    ------
    PerPcsError
        If the gold is no number.
    """
    try:
        value = float(prediction.strip())
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    low, high = min(map(float, labels)), max(map(float, labels))
    return low if abs(low - _true(gold)) > abs(high - _true(gold)) else high


def _true(gold: str) -> float:
    try:
        return float(gold)
    except ValueError:
        raise PerPcsError(
            f"the gold {gold!r} is no number, as MAE and RMSE need; repair the data (perpcs data"
            " check shows such outputs) or set data.task to another task"
        ) from None


def _absolute(prediction: str, gold: str, labels: Labels) -> tuple[float, ...]:
    return (abs(rating(prediction, gold, labels) - _true(gold)),)


def _squared(prediction: str, gold: str, labels: Labels) -> tuple[float, ...]:
    return ((rating(prediction, gold, labels) - _true(gold)) ** 2,)


def _rouge(kind: str) -> Callable[[str, str, Labels], tuple[float, ...]]:
    """F-measure of ROUGE without stemming (Lin, 2004), as LaMP's evaluator reports it."""

    def statistics(prediction: str, gold: str, labels: Labels) -> tuple[float, ...]:
        score = _rouge_scorer(kind).score(gold.strip(), prediction.strip())
        return (float(score[kind].fmeasure),)

    return statistics


@cache
def _rouge_scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False)


METRICS: dict[str, Metric] = {
    "accuracy": Metric(_exact, _mean),
    "f1": Metric(_confusion, _macro_f1, needs_labels=True),
    "mae": Metric(_absolute, _mean, higher_is_better=False, needs_labels=True),
    "rmse": Metric(_squared, _root_mean, higher_is_better=False, needs_labels=True),
    "rouge-1": Metric(_rouge("rouge1"), _mean),
    "rouge-l": Metric(_rouge("rougeL"), _mean),
}
"""Metrics by name."""


def statistics(
    name: str, predictions: Sequence[str], golds: Sequence[str], labels: Labels = ()
) -> np.ndarray:
    """Return what each answer adds to a metric.

    Returns
    -------
    ndarray
        (answers, statistics), float64.

    Raises
    ------
    PerPcsError
        If there is no such metric, or it needs labels and there are none.
    """
    metric = _find(name)
    if metric.needs_labels and not labels:
        raise PerPcsError(f"the metric {name!r} needs the task's labels")
    rows = [metric.statistics(p, g, labels) for p, g in zip(predictions, golds, strict=True)]
    return np.array(rows, dtype=float)


def score(
    name: str, predictions: Sequence[str], golds: Sequence[str], labels: Labels = ()
) -> float:
    """Return a metric over all answers together, as LaMP's evaluator does; nan over none."""
    if not predictions:
        return math.nan
    sums = statistics(name, predictions, golds, labels).sum(0)
    return float(_find(name).value(sums, np.array(len(predictions))))


def _find(name: str) -> Metric:
    try:
        return METRICS[name]
    except KeyError:
        raise PerPcsError(
            f"the metric {name!r} is not known; use one of {', '.join(METRICS)}"
        ) from None
