"""Variants of BM25, TF-IDF, and the words of a score: values by hand."""

import math

import numpy as np
import pytest

from ranker.data.collection import Collection, Doc, MemoryDocs
from ranker.errors import ConfigError, DataError
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.first_stage import FirstStage, first_stage
from ranker.retrieval.tfidf import TFIDF

DOCS = MemoryDocs(
    Doc(f"d{i}", text) for i, text in enumerate(["gull gull fish", "gull lake lake lake", "fish", "stone"])
)
LENGTHS, MEAN = {"d0": 3, "d1": 4, "d2": 1}, 9 / 4
COUNTS = {"d0": {"gull": 2, "fish": 1}, "d1": {"gull": 1}, "d2": {"fish": 1}}
FREQUENCIES = {"gull": 2, "fish": 2}
K1, B, DELTA, N = 0.9, 0.4, 0.5, 4


def by_hand(variant, doc_id, word):
    """The weight of a word in a doc by the formulas of Kamphuis et al., 2020, table 1."""
    count, df = COUNTS[doc_id].get(word, 0), FREQUENCIES[word]
    norm = 1 - B + B * LENGTHS[doc_id] / MEAN
    if variant == "tfidf":
        return (1 + math.log(count)) * math.log(N / df) if count else 0.0
    return {
        "lucene": lambda: math.log(1 + (N - df + 0.5) / (df + 0.5)) * count / (count + K1 * norm),
        "robertson": lambda: math.log(max(1, (N - df + 0.5) / (df + 0.5))) * count / (count + K1 * norm),
        "atire": lambda: math.log(N / df) * count * (K1 + 1) / (count + K1 * norm),
        "bm25l": lambda: (
            math.log((N + 1) / (df + 0.5)) * (K1 + 1) * (count / norm + DELTA) / (K1 + count / norm + DELTA)
        ),
        "bm25+": lambda: math.log((N + 1) / df) * (count * (K1 + 1) / (count + K1 * norm) + DELTA),
    }[variant]()


@pytest.mark.parametrize("variant", ["lucene", "atire", "bm25l", "bm25+", "tfidf"])
def test_scores_by_hand(variant):
    index = TFIDF(DOCS) if variant == "tfidf" else BM25(DOCS, variant=variant)
    run = index.search({"q": "gull fish gull unknown"}, 10).to_run()["q"]
    expected = {d: 2 * by_hand(variant, d, "gull") + by_hand(variant, d, "fish") for d in COUNTS}
    assert run == pytest.approx(expected, rel=1e-5)  # d3 shares no word
    for doc_id in expected:
        words = index.explain("gull fish gull unknown", doc_id)
        got = {word: (count, weight) for word, count, weight in words}
        for word in ("gull", "fish"):
            weight = by_hand(variant, doc_id, word)
            assert got.get(word, (0, 0.0))[1] == pytest.approx(weight, rel=1e-5)
        assert sum(count * weight for _, count, weight in words) == pytest.approx(run[doc_id], rel=1e-5)


def test_robertson_is_never_negative():
    # a word in half of the docs has the weight log 1 = 0, so that its docs are not found
    assert BM25(DOCS, variant="robertson").search({"q": "gull"}, 10).to_run() == {"q": {}}
    assert list(BM25(DOCS, variant="robertson").search({"q": "lake"}, 10).to_run()["q"]) == ["d1"]


def test_a_first_stage_of_another_variant_has_its_own_cache(tmp_path):
    collection = Collection("small", DOCS, {"q": "gull fish"}, {})
    runs = [
        first_stage(collection, 3, tmp_path, FirstStage(variant=variant)).to_run() for variant in ("lucene", "tfidf")
    ]
    assert runs[0] != runs[1] == TFIDF(DOCS).search({"q": "gull fish"}, 3).to_run()
    assert len(list((tmp_path / "bm25").glob("*.npz"))) == 2


def test_ties_and_an_empty_corpus():
    docs = MemoryDocs([Doc("a", "gull"), Doc("c", "gull"), Doc("b", "gull"), Doc("z", "stone")])
    assert TFIDF(docs).search({"q": "gull"}, 2)["q"] == ["c", "b"]
    assert TFIDF(MemoryDocs([])).search({"q": "gull"}, 2).to_run() == {"q": {}}
    assert np.isfinite(TFIDF(docs).num_bytes)


def test_wrong_options():
    with pytest.raises(ConfigError, match=r"^bm25.variant: expected one of lucene, .*; got 'bm26'$"):
        BM25(DOCS, variant="bm26")
    with pytest.raises(DataError, match=r"^explain: expected a query id and a doc id that .*; not found: doc 'd9'$"):
        BM25(DOCS).explain("gull", "d9")
