import numpy as np
import pytest

from ranker.data.collection import Candidates, Doc, MemoryDocs, fingerprint_of
from ranker.errors import DataError


def test_full_text_joins_title_and_text():
    assert Doc("d", "text", "Title").full_text == "Title text"
    assert Doc("d", "text").full_text == "text"


def test_memory_docs_keep_order_and_look_up_by_id():
    docs = MemoryDocs([Doc("b", "1"), Doc("a", "2"), Doc("01", "3")])
    assert [doc.doc_id for doc in docs] == ["b", "a", "01"] and len(docs) == 3
    assert docs["01"].text == "3" and "1" not in docs and 1 not in docs
    with pytest.raises(KeyError):
        docs["1"]


def test_memory_docs_refuse_a_repeated_id():
    with pytest.raises(DataError, match=r"docs: expected each doc id once, got 'a' twice"):
        MemoryDocs([Doc("a", "1"), Doc("a", "1")])


def test_fingerprint_changes_with_any_id_text_title_or_order():
    first, second = Doc("a", "x"), Doc("b", "y")
    variants = [
        [first, second], [second, first], [Doc("c", "x"), second], [Doc("a", "z"), second], [Doc("a", "x", "t"), second],
        [Doc("a", "", "x"), second], [Doc("a", "x b"), Doc("", "y")], [first],
    ]  # fmt: skip
    assert len({MemoryDocs(docs).fingerprint for docs in variants}) == len(variants)
    assert MemoryDocs(variants[0]).fingerprint == fingerprint_of(iter(variants[0])) == MemoryDocs(variants[0]).fingerprint


def test_pc01_candidates_of_a_run_tie_by_doc_id_descending_as_strings():
    candidates = Candidates.from_run({"q1": {"d10": 0.5, "d9": 0.5, "d1": 2.0, "d2": -1.0}, "q2": {}, "q3": {"\u00e9": 1.0}})
    assert candidates["q1"] == ["d1", "d9", "d10", "d2"]
    assert candidates.scores_of("q1").tolist() == [2.0, 0.5, 0.5, -1.0]
    assert candidates["q2"] == [] and candidates["q3"] == ["\u00e9"]
    assert list(candidates) == ["q1", "q2", "q3"] and len(candidates) == 3


def test_an_unknown_query_has_no_candidates():
    candidates = Candidates.from_run({"1": {"d1": 1.0}})
    assert "01" not in candidates and candidates["01"] == [] and len(candidates.scores_of("01")) == 0


def test_candidates_cut_to_a_depth_become_a_run():
    candidates = Candidates.from_lists([("q1", ["a", "long-id", "c"], [3.0, 2.0, 1.0]), ("q2", ["a"], [0.25])])
    assert candidates.to_run(2) == {"q1": {"a": 3.0, "long-id": 2.0}, "q2": {"a": 0.25}}
    assert Candidates.from_run(candidates.to_run()) == candidates


def test_candidates_without_queries():
    candidates = Candidates.from_lists([])
    assert len(candidates) == 0 and candidates.to_run() == {} and candidates.offsets.tolist() == [0]


def test_candidates_take_flat_arrays_not_objects():
    run = {f"q{i}": {f"d{j:07d}": float(j) for j in range(1000)} for i in range(20)}
    candidates = Candidates.from_run(run)
    assert candidates.doc_ids.dtype == np.dtype("S8") and candidates.scores.dtype == np.float64
    assert candidates.doc_ids.nbytes + candidates.scores.nbytes == 20 * 1000 * (8 + 4)
