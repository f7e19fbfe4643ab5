"""The order of docs, by the rules of trec_eval."""

import re
from itertools import pairwise

import numpy as np
import pytest

from ranker.data.ranking import LARGEST, rank_docs, require_finite, separate_ties
from ranker.errors import DataError


def test_pc01_ties_by_doc_id_descending_as_strings():
    assert rank_docs({"d10": 0.5, "d9": 0.5, "d1": 0.5, "e": 0.4, "文": 0.4, "z": 0.9}) == [
        "z",
        "d9",
        "d10",
        "d1",
        "文",
        "e",
    ]


def test_separated_ties_keep_the_order_and_all_other_scores():
    generator = np.random.default_rng(3)
    for _ in range(50):
        scores = generator.choice([0.0, -0.0, 0.5, 0.5 + 1e-9, -3.0, 1e-45, 12.25, 12.25 - 1e-6], size=12)
        docs = {f"d{i}": float(score) for i, score in enumerate(scores)}
        separate = separate_ties({"q": docs})["q"]
        assert rank_docs(separate) == rank_docs(docs)
        ranked = [np.float32(separate[doc]) for doc in rank_docs(docs)]
        assert all(above > below for above, below in pairwise(ranked))
        assert max(abs(separate[doc] - docs[doc]) for doc in docs) < 2e-5  # at most 12 steps of float32 at 12.25
    untied = {"d1": 0.1, "d2": 1e-300, "d3": -1e30}
    assert separate_ties({"q": untied})["q"] == untied


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39, -1e39])
@pytest.mark.parametrize("refuse", [separate_ties, require_finite])
def test_scores_that_are_not_finite_in_float32_are_counted_and_the_first_is_named(refuse, bad):
    run = {"q1": {"a": 1.0, "b": 0.5}, "q2": {"a": 1.0, "b": bad, "c": bad}, "q3": {"d": bad}}
    with pytest.raises(
        DataError, match=re.escape(f"got 3 of 6 that are not, the first {bad} for query 'q2' and doc 'b'")
    ):
        refuse(run)


def test_ties_at_both_ends_of_float32():
    below = float(np.nextafter(np.float32(LARGEST), np.float32(0)))
    assert separate_ties({"q": {"a": LARGEST, "b": LARGEST}}) == {"q": {"b": LARGEST, "a": below}}
    assert separate_ties({"q": {"a": -LARGEST, "b": -below}}) == {"q": {"a": -LARGEST, "b": -below}}
    with pytest.raises(DataError, match="where docs tie, got such a tie for query 'q' and doc 'a'"):
        separate_ties({"q": {"a": -LARGEST, "b": -LARGEST}})
