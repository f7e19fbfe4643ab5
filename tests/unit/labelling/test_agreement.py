"""AUC, Kendall's tau and the report: values computed by hand."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from ranker.labelling.agreement import auc, kendall, report
from ranker.labelling.table import print_report


def test_auc_counts_pairs():
    relevant, scores = np.array([1, 0, 1, 0, 0], bool), np.array([0.9, 0.8, 0.5, 0.5, 0.1])
    # 0.9 is above all three; 0.5 is below 0.8, ties with 0.5 (a half), is above 0.1
    assert auc(relevant, scores) == pytest.approx((3 + 1.5) / 6, abs=1e-15)


def test_auc_equals_a_plain_loop():
    rng = np.random.default_rng(1)
    for _ in range(20):
        relevant, scores = rng.random(12) < 0.4, rng.integers(0, 6, 12).astype(float)
        pairs = [(a > b) + (a == b) / 2 for a in scores[relevant] for b in scores[~relevant]]
        assert auc(relevant, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_auc_without_a_pair_is_not_a_number():
    assert math.isnan(auc(np.ones(2, bool), np.arange(2.0)))
    assert math.isnan(auc(np.zeros(2, bool), np.arange(2.0)))


def test_kendall_by_hand():
    # of 6 pairs, (b, c) alone is ordered otherwise: (5 - 1) / 6
    assert kendall(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])) == pytest.approx(4 / 6, abs=1e-15)
    # tau-b: 2 concordant pairs, 1 tied in the first: 2 / sqrt(2 * 3)
    assert kendall(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(2 / math.sqrt(6), abs=1e-15)
    assert math.isnan(kendall(np.array([1.0, 1]), np.array([1.0, 2])))
    assert math.isnan(kendall(np.array([1.0]), np.array([1.0])))


ONE = {"q1": {"a": 3.0, "b": 2.0, "c": 1.0}, "q2": {"a": 1.0, "b": 2.0}, "q3": {"a": 1.0}}
OTHER = {"q1": {"a": 3.0, "b": 1.0, "c": 2.0}, "q2": {"a": 2.0, "b": 2.0}, "q3": {"a": 5.0}}
QRELS = {"q1": {"b": 1}, "q2": {"a": 2, "b": 1}, "q3": {"a": 0}}


def test_the_report_by_hand():
    got = report({"one": ONE, "other": OTHER}, QRELS, ["nDCG@10", "RR@10"], relevance=2)
    # at grade 2, q2 alone has a relevant doc and another one
    assert (got["rows"]["one"]["AUC"], got["rows"]["one"]["AUC_queries"]) == (0.0, 1)
    assert got["rows"]["other"]["AUC"] == 0.5
    # RR at grade 2: q1 and q3 have none, q2 has a at rank 2; equal scores are ordered by id descending
    assert got["rows"]["one"]["RR(rel=2)@10"] == pytest.approx(0.5 / 3)
    # nDCG: q1 b at rank 2: 1 / log2(3); q2: (1 + 2 / log2(3)) / (2 + 1 / log2(3)); q3: 0
    log = math.log2(3)
    assert got["rows"]["one"]["nDCG@10"] == pytest.approx((1 / log + (1 + 2 / log) / (2 + 1 / log)) / 3, abs=1e-12)
    # tau: q1 (2 - 1) / 3; q2 has a constant, q3 one doc
    assert got["kendall"] == {"one ~ other": {"tau": pytest.approx(1 / 3), "queries": 1}}
    assert got["rows"]["one"]["pairs"] == 6


def test_the_mean_is_over_queries_not_over_pairs():
    got = report({"one": ONE}, {"q1": {"b": 1}, "q2": {"b": 1}}, ["RR@10"])
    # q1: b is above c and below a; q2: b is above a
    assert got["rows"]["one"]["AUC"] == pytest.approx((0.5 + 1) / 2)


def test_without_judgements_there_is_agreement_only():
    got = report({"one": ONE, "other": OTHER}, {}, ["nDCG@10"])
    assert got["rows"]["one"] == {"pairs": 6, "AUC": None, "AUC_queries": 0}
    assert list(got["kendall"]) == ["one ~ other"]


def test_the_table_shows_every_row():
    text = io.StringIO()
    content = {"queries": 3, "scale": "zscore", **report({"labels": ONE, "x/[b]": OTHER}, QRELS, ["nDCG@10"])}
    print_report(content, Console(file=text, width=120))
    shown = text.getvalue()
    assert "labels of 3 queries, scale: zscore" in shown and "x/[b]" in shown
    assert "Kendall's tau-b of labels ~ x/[b]: 0.3333, mean over 1 queries" in shown
