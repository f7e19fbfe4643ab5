import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.sources.cwe import CWE
from ranker.data.trec import read_qrels
from ranker.errors import DataError

SHARED = (
    Path(os.environ.get("RANKER_SHARED_DATA") or Path(__file__).resolve().parents[3] / ".." / "shared" / "data") / "cwe"
)
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the folder shared/data/cwe with a finished copy is not there"
)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("cwe2") is None, reason="cwe2 (extra demo) is not installed"
)


@pytest.fixture(scope="module")
def splits():
    return CWE().load()


def parts_of(splits):
    return {"train": splits.train, "dev": splits.val, "test": splits.tests["cwe"]}


@needs_package
def test_counts(splits):
    assert len(splits.train.docs) == 938
    assert {name: len(part.queries) for name, part in parts_of(splits).items()} == {
        "train": 1467,
        "dev": 200,
        "test": 300,
    }
    assert sum(len(judged) for part in parts_of(splits).values() for judged in part.qrels.values()) == 2720
    assert list(splits.tests) == ["cwe"] and splits.train.candidates is None


@needs_package
@needs_shared
def test_equals_the_finished_copy(splits):
    copy = JsonlDocs(SHARED / "docs.jsonl.gz")
    assert list(splits.train.docs) == list(copy)
    queries = read_queries(SHARED / "queries.tsv")
    assert {query_id: text for part in parts_of(splits).values() for query_id, text in part.queries.items()} == queries
    for name, part in parts_of(splits).items():
        assert part.qrels == read_qrels(SHARED / f"qrels.{name}.txt")


@needs_package
def test_test_queries_are_pinned(splits):
    """Figures of two versions compare only if they are of the same queries and texts."""
    test = splits.tests["cwe"]
    digest = hashlib.blake2b(
        "\n".join(f"{q}\t{text}\t{sorted(test.qrels[q])}" for q, text in test.queries.items()).encode(), digest_size=8
    )
    assert digest.hexdigest() == "b08b9cdb94eee3ad"


@needs_package
def test_no_query_gives_its_answer_away(splits):
    for part in parts_of(splits).values():
        assert not [text for text in part.queries.values() if re.search(r"CWE-\d", text)]


@needs_package
def test_another_seed_deals_other_queries_of_the_same_set(splits):
    other = CWE(split_seed=1).load()
    assert set(other.tests["cwe"].queries) != set(splits.tests["cwe"].queries)
    assert set().union(*(p.queries for p in parts_of(other).values())) == set().union(
        *(p.queries for p in parts_of(splits).values())
    )


@needs_package
def test_notice_holds_the_owners_designation_and_licence(splits):
    assert re.search(r"Copyright © 2006.2022, The MITRE Corporation", splits.notice)
    assert "MITRE hereby grants you a non-exclusive, royalty-free license" in splits.notice


@needs_package
def test_the_package_is_read_not_imported(splits):
    assert "cwe2" not in sys.modules


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(DataError, match=r"^data=cwe: expected the package cwe2, .*; run pip install -e '\.\[demo\]'$"):
        CWE().load()


@needs_package
def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("ranker.data.sources.cwe._VERSION", "2.9")
    with pytest.raises(DataError, match=r"expected cwe2 2.9, .* got 3.0.0"):
        CWE().load()
