"""Measures by the length of relevant docs, on values computed by hand."""

import math

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.evaluation.by_length import Lengths, measures_by_length
from ranker.evaluation.report import write_evaluation

QRELS = {"q1": {"short": 1, "long": 1, "bad": 0}, "q2": {"long": 2}, "q3": {"lost": 1}}
RUN = {
    "q1": {"long": 4.0, "bad": 3.0, "other": 2.0, "short": 1.0},
    "q2": {"other": 2.0, "long": 1.0},
    "q3": {"other": 1.0},
}


def lengths(*bounds):
    texts = {"short": "a b", "long": "a b c d e", "bad": "a", "other": "a"}
    docs = MemoryDocs(Doc(doc_id, text, "title" if doc_id == "long" else "") for doc_id, text in texts.items())
    collection = Collection("c", docs, {"q1": "x", "q2": "x", "q3": "x"}, QRELS, Candidates.from_run(RUN))
    return Lengths.of(collection, bounds)


def test_lengths_are_words_of_title_and_text():
    found = lengths(3, 6)
    assert found.words == {"short": 2, "long": 6}  # docs that are not relevant are not counted, "lost" has no text
    assert list(found.buckets()) == [(0, 3, {"short"}), (3, 6, set()), (6, None, {"long"})]


def test_a_bucket_leaves_out_relevant_docs_of_other_lengths_and_keeps_all_other_docs():
    short, long = measures_by_length([RUN, {}], QRELS, lengths(3, 6), ["nDCG@10", "RR"], 1)
    # q1 without the long doc: bad, other, short
    assert short == {
        "words": [0, 3], "num_queries": 1, "num_docs": 1,
        "measures": {"nDCG@10": 1 / math.log2(4), "RR": 1 / 3}, "baseline": {"nDCG@10": 0.0, "RR": 0.0},
    }  # fmt: skip
    # q1 without the short doc: long first; q2: long second
    assert long["measures"] == {"nDCG@10": (1 + 1 / math.log2(3)) / 2, "RR": 0.75}
    assert (long["words"], long["num_queries"], long["num_docs"]) == ([6, None], 2, 2)


def test_an_evaluation_writes_them_only_where_lengths_are_given(tmp_path):
    plain = write_evaluation(tmp_path / "a", RUN, QRELS, ["RR"])
    content = write_evaluation(tmp_path / "b", RUN, QRELS, ["RR"], lengths=lengths(3))
    assert "by_length" not in plain
    assert [(row["words"], row["measures"]) for row in content["by_length"]] == [
        ([0, 3], {"RR": 1 / 3}),
        ([3, None], {"RR": 0.75}),
    ]
