from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, fingerprint_of
from ranker.data.ir_datasets_records import scoreddocs_of
from ranker.data.trec import read_candidates
from ranker.errors import DataError
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.report import first_stage_run, write_evaluation


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
        [first, second],
        [second, first],
        [Doc("c", "x"), second],
        [Doc("a", "z"), second],
        [Doc("a", "x", "t"), second],
        [Doc("a", "", "x"), second],
        [Doc("a", "x b"), Doc("", "y")],
        [first],
    ]
    assert len({MemoryDocs(docs).fingerprint for docs in variants}) == len(variants)
    assert (
        MemoryDocs(variants[0]).fingerprint == fingerprint_of(iter(variants[0])) == MemoryDocs(variants[0]).fingerprint
    )


def test_pc01_candidates_of_a_run_tie_by_doc_id_descending_as_strings():
    candidates = Candidates.from_run(
        {"q1": {"d10": 0.5, "d9": 0.5, "d1": 2.0, "d2": -1.0}, "q2": {}, "q3": {"\u00e9": 1.0}}
    )
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
    assert candidates.doc_ids.nbytes + candidates.scores.nbytes == 20 * 1000 * (8 + 8)


# by hand: all four differ as doubles, d1 and d0 are equal in single precision, where the tie rule would put d1 first
SATURATED = {"d0": 0.999999981, "d1": 0.999999973, "d2": 0.99999991, "d3": 0.5}


def test_pc2_08_the_first_stage_is_measured_with_the_scores_of_its_file(tmp_path):
    path = tmp_path / "first.run"
    path.write_text(
        "".join(f"{query} Q0 {doc} 1 {score} t\n" for query in ("q1", "q2") for doc, score in SATURATED.items())
    )
    qrels = {"q1": {"d0": 1}, "q2": {"d0": 1}}
    collection = Collection(
        "c", MemoryDocs(Doc(doc_id, "x") for doc_id in SATURATED), {"q1": "a", "q2": "b"}, qrels, read_candidates(path)
    )
    assert first_stage_run(collection, 10) == {"q1": SATURATED, "q2": SATURATED}
    assert first_stage_run(replace(collection, candidates=read_candidates(path).top(2)), 10)["q1"] == {
        "d0": 0.999999981,
        "d1": 0.999999973,
    }
    assert evaluate(first_stage_run(collection, 10), qrels, ["RR@10", "nDCG@10"]).means == {
        "RR@10": 1.0,
        "nDCG@10": 1.0,
    }
    written = write_evaluation(
        tmp_path / "out", first_stage_run(collection, 10), qrels, ["RR@10"], baseline=first_stage_run(collection, 10)
    )
    assert written["measures"]["RR@10"] == written["comparison"]["RR@10"]["baseline"] == 1.0


def test_pc2_08_runs_and_lists_become_candidates_without_rounding():
    for candidates in (
        Candidates.from_run({"q": SATURATED}),
        Candidates.from_lists([("q", list(SATURATED), list(SATURATED.values()))]),
    ):
        assert candidates["q"] == ["d0", "d1", "d2", "d3"] and candidates.to_run() == {"q": SATURATED}


def test_pc2_08_the_first_docs_keep_scores_queries_and_order():
    candidates = Candidates.from_lists(
        [("q1", ["d9", "d1", "d5"], [3.0, 3.0, 1.0]), ("q2", [], []), ("q3", ["d2"], [7.0])]
    )
    assert [candidates.top(depth).to_run() for depth in (1, 2, 9)] == [candidates.to_run(depth) for depth in (1, 2, 9)]
    assert list(candidates.top(1)) == ["q1", "q2", "q3"] and candidates.top(2)["q1"] == ["d9", "d1"]
    assert candidates.where(candidates.doc_ids == b"d5").to_run() == {"q1": {"d5": 1.0}, "q2": {}, "q3": {}}
    assert Candidates.from_lists([]).top(3).to_run() == {}


def test_pc2_08_scoreddocs_of_ir_datasets_are_cut_by_their_own_scores():
    class Scored(NamedTuple):
        query_id: str
        doc_id: str
        score: float

    dataset = SimpleNamespace(
        scoreddocs_iter=lambda: (Scored("q", doc_id, score) for doc_id, score in reversed(SATURATED.items()))
    )
    candidates = scoreddocs_of(dataset, "x", {"q": "text"})
    assert candidates["q"] == ["d0", "d1", "d2", "d3"] and candidates.top(1).to_run() == {"q": {"d0": 0.999999981}}
