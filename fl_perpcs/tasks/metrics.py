"""Scores of one prediction against its gold output."""

from collections.abc import Callable
from functools import cache
from typing import Any

from fl_perpcs.errors import PerPcsError


def accuracy(prediction: str, gold: str) -> float:
    """Return 1.0 if both are the same text, spaces around it and case apart, else 0.0."""
    return float(prediction.strip().casefold() == gold.strip().casefold())


def rouge_l(prediction: str, gold: str) -> float:
    """Return the F-measure of ROUGE-L with stemming, in [0, 1].

    References
    ----------
    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    return float(_rouge_scorer().score(gold, prediction)["rougeL"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


METRICS: dict[str, Callable[[str, str], float]] = {"accuracy": accuracy, "rouge-l": rouge_l}
"""Metrics by name; each takes (prediction, gold), and more is better."""


def score(name: str, prediction: str, gold: str) -> float:
    """Return the score of one prediction.

    Parameters
    ----------
    name : str
        A name in :data:`METRICS`.
    prediction, gold : str
        What the model wrote, and what it should have written.

    Raises
    ------
    PerPcsError
        If there is no such metric.
    """
    try:
        metric = METRICS[name]
    except KeyError:
        raise PerPcsError(
            f"the metric {name!r} is not known; use one of {', '.join(METRICS)}"
        ) from None
    return metric(prediction, gold)
