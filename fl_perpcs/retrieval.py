"""Which history items are relevant to a query: BM25, or dense with a sentence encoder."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from fl_perpcs.errors import PerPcsError
from fl_perpcs.paths import home

Ranker = Callable[[Sequence[str], Sequence[str], int, Sequence[int]], list[list[int]]]
"""(documents, queries, k, limits) to the indices of each query's best documents, best first. Only
the first ``limits[i]`` documents may be found for query ``i``, so there can be fewer than k."""


def find_ranker(retriever: str, encoder: str, device: torch.device) -> Ranker:
    """Return the ranker that ``prompts.retriever`` names, ``bm25`` or ``dense``.

    Raises
    ------
    PerPcsError
        If the sentence encoder of ``dense`` cannot be loaded.
    """
    if retriever == "bm25":
        return rank_bm25
    return partial(_rank_dense, *_encoder(encoder, device))


def rank_bm25(
    documents: Sequence[str], queries: Sequence[str], k: int, limits: Sequence[int]
) -> list[list[int]]:
    """Rank documents by BM25 (Lucene's variant, k1 = 1.5, b = 0.75).

    References
    ----------
    Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009.
    Lù, "BM25S: Orders of magnitude faster lexical search via eager sparse scoring", 2024.
    """
    import bm25s

    tokenize = partial(bm25s.tokenize, stopwords=None, return_ids=False, show_progress=False)
    corpus = tokenize(list(documents))
    if not any(corpus):  # nothing but punctuation: no word could match
        return [_best(np.zeros(limit), k) for limit in limits]
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    return [
        _best(index.get_scores(words)[:limit] if words else np.zeros(limit), k)
        for words, limit in zip(tokenize(list(queries)), limits, strict=True)
    ]


def _rank_dense(
    tokenizer: Any,
    model: Any,
    documents: Sequence[str],
    queries: Sequence[str],
    k: int,
    limits: Sequence[int],
) -> list[list[int]]:
    """Rank documents by the cosine of sentence embeddings."""
    vectors = embed(tokenizer, model, [*documents, *queries])
    scores = vectors[len(documents) :] @ vectors[: len(documents)].T
    return [_best(row[:limit], k) for row, limit in zip(scores.numpy(), limits, strict=True)]


def embed(tokenizer: Any, model: Any, texts: Sequence[str], batch_size: int = 32) -> torch.Tensor:
    """Return unit sentence embeddings: the mean over tokens of the encoder's last hidden state.

    Returns
    -------
    Tensor
        (texts, hidden size), float32 on the CPU.

    References
    ----------
    Reimers and Gurevych, "Sentence-BERT", EMNLP 2019.
    """
    rows = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            list(texts[start : start + batch_size]),
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        ).to(model.device)
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        rows.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
    return torch.cat(rows)


def _best(scores: np.ndarray, k: int) -> list[int]:
    """Return the indices of the k highest scores; of equal ones the latest, as the freshest."""
    order = np.lexsort((-np.arange(len(scores)), -scores))
    return [int(i) for i in order[:k]]


@cache
def _encoder(name: str, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = home() / "models" / "minilm"
    source = str(folder) if name == "minilm" else name
    if name == "minilm" and not folder.is_dir():
        raise PerPcsError(f"{folder} is not there. Run: perpcs fetch minilm")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = AutoModel.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise PerPcsError(
            f"prompts.encoder = {name!r} cannot be loaded: {error}; expected minilm (after"
            " perpcs fetch minilm), or a sentence encoder's folder or Hugging Face name"
        ) from None
    return tokenizer, model.to(device).eval()
