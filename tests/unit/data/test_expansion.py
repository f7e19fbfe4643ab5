"""Docs with expansions from a file."""

import pytest

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.expansion import expanded
from ranker.errors import DataError
from ranker.retrieval.bm25 import BM25


def test_expansions_are_appended_and_change_the_fingerprint(tmp_path):
    docs = MemoryDocs([Doc("d1", "a gull", "birds"), Doc("d2", "a lake")])
    collection = Collection("small", docs, {"q": "herring"}, {})
    (tmp_path / "words.tsv").write_text("d1\therring eater\n")
    splits = expanded(Splits(collection, None, {"test": collection}), tmp_path / "words.tsv")
    longer = splits.tests["test"].docs
    assert [doc.full_text for doc in longer] == ["birds a gull herring eater", "a lake"]
    assert longer["d1"].text == "a gull herring eater" and "d2" in longer and len(longer) == 2
    assert longer.fingerprint == splits.train.docs.fingerprint != docs.fingerprint
    assert list(BM25(longer).search({"q": "herring"}, 5).to_run()["q"]) == ["d1"]
    assert not BM25(docs).search({"q": "herring"}, 5).to_run()["q"]
    (tmp_path / "words.tsv").write_text("x1\therring eater\n")
    with pytest.raises(DataError, match=r"words.tsv: expected expansions of docs of small, got none .*'x1'"):
        expanded(Splits(collection, None, {}), tmp_path / "words.tsv")
