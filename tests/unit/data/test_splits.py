import logging

import pytest

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.splits import (
    check_candidates,
    check_disjoint,
    check_judged_docs,
    cut_validation,
    hash_order,
    split_queries,
    take_queries,
)
from ranker.errors import DataError

DOCS = MemoryDocs([Doc("d1", "one"), Doc("d2", "two"), Doc("d3", "three")])


def collection(query_ids="abcdefghij", name="train", **changes):
    fields = {
        "queries": {query_id: f"text of {query_id}" for query_id in query_ids},
        "qrels": {query_id: {"d1": 1} for query_id in query_ids},
        "triples": None,
        "candidates": None,
    } | changes
    return Collection(name, DOCS, **fields)


def test_hash_order_depends_on_seed_and_ids_alone():
    ids = [str(number) for number in range(200)]
    assert hash_order(ids, 0) == hash_order(reversed(ids), 0)
    assert hash_order(ids, 0) != hash_order(ids, 1) and sorted(hash_order(ids, 0)) == sorted(ids)
    # pinned, so that a split does not move between versions
    assert hash_order(["q1", "q2", "q3", "q4", "q5"], 0) == ["q1", "q5", "q2", "q3", "q4"]


@pytest.mark.parametrize("total", [0, 1, 2, 3, 10, 1000])
def test_split_queries_is_a_partition_of_the_sizes_asked_for(total):
    parts = split_queries(map(str, range(total)), 0.1, 0.2, seed=3)
    assert sorted(parts["train"] + parts["dev"] + parts["test"]) == sorted(map(str, range(total)))
    if total >= 10:
        assert [len(parts[part]) for part in ("train", "dev", "test")] == [total * 7 // 10, total // 10, total // 5]
    if total >= 2:
        assert parts["dev"] and parts["test"]


def test_everything_can_be_a_test_query():
    parts = split_queries("abc", 0.0, 1.0, seed=0)
    assert sorted(parts["test"]) == ["a", "b", "c"] and parts["dev"] == parts["train"] == []


def test_cut_validation_takes_queries_and_their_triples_out_of_training():
    triples = [(query_id, "d1", "d2") for query_id in "abcdefghijabc"]
    train, val = cut_validation(collection(triples=triples), 3, seed=0)
    assert len(val.queries) == 3 and len(train.queries) == 7 and not set(train.queries) & set(val.queries)
    assert val.queries.keys() == val.qrels.keys() and val.name == "val" and val.triples is None
    assert list(train.triples) == list(train.triples) == [triple for triple in triples if triple[0] in train.queries]
    assert not {query_id for query_id, _, _ in train.triples} & set(val.queries)


def test_cut_validation_takes_judged_queries_only():
    data = collection(qrels={query_id: {"d1": 1} for query_id in "abc"})
    train, val = cut_validation(data, 2, seed=0)
    assert set(val.queries) <= set("abc") and len(train.queries) == 8
    with pytest.raises(
        DataError, match=r"train: expected more judged training queries than the 3 to validate on, got 3"
    ):
        cut_validation(data, 3, seed=0)


def test_take_queries_keeps_order_and_candidates():
    candidates = Candidates.from_run({"a": {"d1": 1.0}})
    taken = take_queries(collection("cba", candidates=candidates), ["a", "c"], "part")
    assert list(taken.queries) == ["c", "a"] and taken.candidates is candidates and taken.name == "part"


def test_queries_in_two_splits_are_refused():
    train, test = collection("abc"), collection("cde", name="test")
    with pytest.raises(DataError, match=r"test: expected queries that train lacks, got 1 that both have, such as 'c'"):
        check_disjoint(Splits(train, None, {"test": test}))
    with pytest.raises(DataError, match=r"val: expected queries that train lacks"):
        check_disjoint(Splits(train, collection("a", name="val"), {}))
    other_text = collection("cde", name="test", queries={"c": "another query", "d": "x", "e": "y"})
    check_disjoint(Splits(train, None, {"test": other_text}))  # two collections that both have a query c
    check_disjoint(Splits(None, None, {"one": test, "two": test}))  # two tests may share queries


def test_judged_docs_that_the_collection_lacks(caplog):
    with caplog.at_level(logging.WARNING):
        check_judged_docs({"a": {"d1": 1, "d9": 1}, "b": {"d8": 0}}, collection(), "qrels.txt")
    assert (
        "qrels.txt: 2 of 3 judged docs, such as 'd8', are not in the collection; they count as not found" in caplog.text
    )
    with pytest.raises(
        DataError,
        match=r"qrels.txt: expected judgements of docs in the collection, got 1 unknown ids such as 'x1'.* like 'd1'",
    ):
        check_judged_docs({"a": {"x1": 1}}, collection(), "qrels.txt")


def test_candidates_that_do_not_belong(caplog):
    with caplog.at_level(logging.WARNING):
        check_candidates(collection("ab", candidates=Candidates.from_run({"a": {"d1": 1.0}, "z": {"x": 1.0}})), "a.run")
    assert "a.run: 1 of 2 queries of train have no candidates, such as 'b'; all measures are 0 for them" in caplog.text
    with pytest.raises(DataError, match=r"a.run: expected candidates from the collection, got the unknown doc id 'd7'"):
        check_candidates(
            collection("ab", candidates=Candidates.from_run({"a": {"d7": 1.0}, "b": {"d1": 1.0}})), "a.run"
        )
    with pytest.raises(
        DataError,
        match=r"a.run: expected candidates for the queries of train \(ids like 'a'\), got none "
        r"\(ids of the run look like 'A'\)",
    ):
        check_candidates(collection("ab", candidates=Candidates.from_run({"A": {"d1": 1.0}})), "a.run")
