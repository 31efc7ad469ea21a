"""Retrieval: BM25 by its formula, dense by hand-made sentence embeddings."""

from math import log

import pytest
import torch
from transformers import BertConfig, BertModel

from fl_perpcs.errors import PerPcsError
from fl_perpcs.retrieval import embed, find_ranker, rank_bm25


@pytest.mark.parametrize("k", [0, 1, 2, 4, 9])
def test_bm25_gives_k_or_all(k):
    (found,) = rank_bm25(["aa bb", "bb cc", "zz"], ["bb"], k, [3])
    assert len(found) == min(k, 3)
    assert set(found[:2]) <= {0, 1}


def test_bm25_without_a_common_word_or_any_word_takes_the_latest():
    assert rank_bm25(["one two", "three four"], ["qqq"], 1, [2]) == [[1]]
    assert rank_bm25(["!", "?"], ["one"], 1, [2]) == [[1]]
    assert rank_bm25(["one", "two"], [""], 2, [2]) == [[1, 0]]


def test_bm25_scores_are_those_of_the_formula():
    documents = ["red red blue", "blue green", "green yellow black white"]
    # Lucene's BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), k1 = 1.5, b = 0.75.
    lengths = [3, 2, 4]
    mean = sum(lengths) / 3

    def weight(word):
        n = sum(word in d.split() for d in documents)
        return log(1 + (3 - n + 0.5) / (n + 0.5))

    def score(query, i):
        words = documents[i].split()
        norm = 1.5 * (0.25 + 0.75 * lengths[i] / mean)
        return sum(weight(w) * words.count(w) / (words.count(w) + norm) for w in query.split())

    for query in ("red blue", "green blue", "white", "blue blue green"):
        order = sorted(range(3), key=lambda i: (-score(query, i), -i))
        assert rank_bm25(documents, [query], 3, [3]) == [order]


@pytest.fixture
def encoder(tokenizer):
    """A random sentence encoder of width 16."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return BertModel(config).eval()


TEXTS = ["A boxer in Brooklyn.", "A slow film.", "Long ago, a family", "It ends."]


def test_embeddings_are_unit_means_over_tokens_whatever_the_batch(tokenizer, encoder):
    found = embed(tokenizer, encoder, TEXTS, batch_size=3)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            mean = encoder(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-5, rtol=0)


def test_dense_ranks_by_cosine_and_keeps_the_limits(tokenizer, encoder, tmp_path):
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    rank = find_ranker("dense", str(tmp_path / "encoder"), torch.device("cpu"))
    cosines = embed(tokenizer, encoder, TEXTS) @ embed(tokenizer, encoder, ["A family film."]).T
    order = cosines.flatten().argsort(descending=True).tolist()
    assert rank(TEXTS, ["A family film."], 4, [4]) == [order]
    assert rank(TEXTS, ["A family film."], 2, [3]) == [[i for i in order if i < 3][:2]]


def test_a_missing_encoder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(PerPcsError, match="Run: perpcs fetch minilm"):
        find_ranker("dense", "minilm", torch.device("cpu"))
    with pytest.raises(PerPcsError, match=r"prompts\.encoder = '.*nothing' cannot be loaded"):
        find_ranker("dense", str(tmp_path / "nothing"), torch.device("cpu"))
