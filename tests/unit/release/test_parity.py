"""The numbers of parity.json are those of a plain loop; what is too far is refused."""

import math

import numpy as np
import pytest

from ranker.errors import DataError
from ranker.release.parity import ScoredSet, compare, faults

QRELS = {"a": {"1": 1, "4": 2}, "b": {"2": 1}, "unscored": {"1": 1}}
ORIGINAL = {"a": {"1": 0.5, "2": 0.9, "3": -0.2, "4": 0.1}, "b": {"1": 2.0, "2": 1.5, "3": 1.0}, "c": {"1": 1.0}}
EXPORTED = {"a": {"1": 0.95, "2": 0.9, "3": -0.25, "4": 0.1}, "b": {"1": 1.4, "2": 1.5, "3": 1.1}, "c": {"1": 1.0}}


def scored(exported=EXPORTED, alike=None):
    ids = [(query, doc) for query, docs in ORIGINAL.items() for doc in docs]
    original = np.array([ORIGINAL[query][doc] for query, doc in ids])
    other = np.array([exported[query][doc] for query, doc in ids])
    mask = np.ones(len(ids), bool) if alike is None else np.array(alike)
    return ScoredSet([query for query, _ in ids], [doc for _, doc in ids], original, other, mask, QRELS)


def ndcg(docs, grades):
    order = sorted(docs, key=docs.get, reverse=True)[:10]
    gain = sum(grades.get(doc, 0) / math.log2(i + 2) for i, doc in enumerate(order))
    best = sum(grade / math.log2(i + 2) for i, grade in enumerate(sorted(grades.values(), reverse=True)[:10]))
    return gain / best


def tau(one, other):
    docs, agree, number = list(one), 0, 0
    for i in range(len(docs)):
        for j in range(i):
            number += 1
            agree += np.sign((one[docs[i]] - one[docs[j]]) * (other[docs[i]] - other[docs[j]]))
    return agree / number


def test_the_numbers_are_those_of_a_plain_loop():
    content = compare(scored())
    gaps = [abs(EXPORTED[query][doc] - ORIGINAL[query][doc]) for query in ORIGINAL for doc in ORIGINAL[query]]
    flat = [score for docs in ORIGINAL.values() for score in docs.values()]
    mean = sum(flat) / len(flat)
    spread = math.sqrt(sum((score - mean) ** 2 for score in flat) / len(flat))
    assert (content["queries"], content["pairs"], content["pairs_cut_otherwise"]) == (3, 8, 0)
    assert content["largest_gap"] == pytest.approx(max(gaps)) == pytest.approx(0.6)
    assert content["mean_gap"] == pytest.approx(sum(gaps) / 8)
    assert content["score_std"] == pytest.approx(spread)
    assert content["gap_share"] == pytest.approx(0.6 / spread)
    assert content["kendall_tau"] == pytest.approx(
        (tau(ORIGINAL["a"], EXPORTED["a"]) + tau(ORIGINAL["b"], EXPORTED["b"])) / 2
    )
    changes = []
    for query in ("a", "b"):  # the query without scores is not compared
        before, after = ndcg(ORIGINAL[query], QRELS[query]), ndcg(EXPORTED[query], QRELS[query])
        changes.append(after - before)
    assert content["nDCG@10"]["change"] == pytest.approx(sum(changes) / 2)
    low, high = content["nDCG@10"]["interval"]
    assert (low, high) == pytest.approx((min(changes), max(changes)))  # of two queries: both drawn twice


def test_pairs_that_are_cut_otherwise_are_counted_apart():
    content = compare(scored(alike=[True] * 4 + [False] + [True] * 3))  # the pair with the largest gap
    assert content["largest_gap"] == pytest.approx(0.45) and content["largest_gap_cut_otherwise"] == pytest.approx(0.6)
    assert content["pairs_cut_otherwise"] == 1


def test_equal_scores_and_no_judgements():
    same = scored(ORIGINAL)
    content = compare(ScoredSet(same.query_ids, same.doc_ids, same.original, same.exported, same.alike, {}))
    assert content["largest_gap"] == content["gap_share"] == 0 and content["kendall_tau"] == 1
    assert "nDCG@10" not in content and faults({"x": content}, 1e-9, 0.0) == []


def test_what_is_too_far_is_a_fault_in_one_line():
    content = compare(scored())
    (gap, loss) = faults({"cwe": content}, max_gap=0.5, max_loss=-1.0)
    assert gap.startswith("cwe: expected scores within max_gap=0.5 of") and "gap of 0.6," in gap and "\n" not in gap
    assert loss == f"cwe: expected nDCG@10 to fall by at most max_loss=-1, got {content['nDCG@10']['change']:+.4f}"
    assert faults({"cwe": content}, max_gap=2.0, max_loss=0.5) == []


def test_scores_that_are_not_finite_are_refused():
    broken = {**EXPORTED, "c": {"1": math.nan}}
    with pytest.raises(DataError, match="export: expected finite scores, got 1 of 8 that are not"):
        compare(scored(broken))
