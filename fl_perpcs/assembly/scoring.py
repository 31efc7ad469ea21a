"""What a site asks for, and how well each piece answers it.

References
----------
Tan, Liu and Jiang, "Personalized Pieces", EMNLP 2024, section 3.3.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fl_perpcs.config import SCORERS as NAMES
from fl_perpcs.plugins import find

Scorer = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""(gates (n, d), query (d,), population query (d,) or None, popularity λ) to scores (n,)."""


def example_queries(x: Tensor, predicts_response: Tensor) -> Tensor:
    """Return for each example the mean over R of LN(x_t).

    Parameters
    ----------
    x : Tensor
        The site's input, (batch, tokens, d_in).
    predicts_response : Tensor
        R, the positions whose next token is a response token, (batch, tokens), bool.

    Returns
    -------
    Tensor
        (examples, d_in), float32, without the examples that have no response tokens.
    """
    normed = layer_norm(x.float(), x.shape[-1:])
    mask = predicts_response.unsqueeze(-1)
    counts = mask.sum(dim=1)
    means = (normed * mask).sum(dim=1) / counts.clamp(min=1)
    return means[counts.squeeze(-1) > 0]


def site_query(x: Tensor, predicts_response: Tensor) -> Tensor:
    """Return the query of a site, (d_in,): the mean over examples of the mean over R of LN(x_t).

    Parameters as in :func:`example_queries`.
    """
    return example_queries(x, predicts_response).mean(dim=0)


def gate_scores(gates: Tensor, query: Tensor) -> Tensor:
    """Return s_i = LN(g_i)·q / √d for n gates (n, d) and a query (d,), as (n,)."""
    return layer_norm(gates, gates.shape[-1:]) @ query / gates.shape[-1] ** 0.5


def published(
    gates: Tensor, query: Tensor, population: Tensor | None = None, popularity: float = 1.0
) -> Tensor:
    """Return the published scores, :func:`gate_scores`."""
    return gate_scores(gates, query)


def centred(
    gates: Tensor, query: Tensor, population: Tensor | None, popularity: float = 0.0
) -> Tensor:
    """Return fit + λ·popularity of each piece.

    With q̄ the population's mean query, the fit of a piece is LN(g_i)·(q - q̄)/√d, how much more
    it suits this user than users at large, and its popularity LN(g_i)·q̄/√d, how much it suits
    everybody. λ = 1 gives the published scores. Centring the gates as well would shift all scores
    by the same number, which neither top-k nor a softmax sees.

    Raises
    ------
    ValueError
        Without a population query.
    """
    if population is None:
        raise ValueError("centred scores need the population's query of the site")
    return gate_scores(gates, query - population) + popularity * gate_scores(gates, population)


_BUILT_IN: dict[str, Scorer] = dict(zip(NAMES, (published, centred), strict=True))


def find_scorer(name: str) -> Scorer:
    """Return the scorer that ``assembly.scorer`` names."""
    scorer: Scorer = find("assembly.scorer", name, _BUILT_IN)
    return scorer


def mean_over_sites(
    scores: Mapping[str, Tensor], sharers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return each sharer's mean score over the sites that it has a piece of: its fit as a whole."""
    totals: dict[str, list[float]] = {}
    for site, found in scores.items():
        for sharer, score in zip(sharers[site], found.tolist(), strict=True):
            totals.setdefault(sharer, []).append(score)
    return {sharer: sum(found) / len(found) for sharer, found in sorted(totals.items())}


def with_fit(scores: Tensor, sharers: Sequence[str], fit: Mapping[str, float] | None) -> Tensor:
    """Return the scores (n,) of a site's pieces plus their sharers' fit as a whole, if known."""
    if fit is None:
        return scores
    return scores + torch.tensor([fit[sharer] for sharer in sharers]).to(scores)
