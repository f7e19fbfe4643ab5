"""The order of docs, by the rules of trec_eval."""

from itertools import pairwise

import numpy as np

from ranker.ranking import rank_docs, separate_ties


def test_pc01_ties_by_doc_id_descending_as_strings():
    assert rank_docs({"d10": 0.5, "d9": 0.5, "d1": 0.5, "e": 0.4, "文": 0.4, "z": 0.9}) == ["z", "d9", "d10", "d1", "文", "e"]


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
