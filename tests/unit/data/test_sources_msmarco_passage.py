import importlib.util
import logging
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ranker.data.ir_datasets_docs import IrDatasetsDocs, docs_of
from ranker.data.sources.msmarco_passage import MsMarcoPassage
from ranker.data.splits import TriplesWithout
from ranker.data.tsv_docs import TsvDocs
from ranker.errors import ConfigError, DataError

_spec = importlib.util.spec_from_file_location(
    "ir_datasets_home", Path(__file__).resolve().parents[2] / "assets" / "ir_datasets_home.py"
)
assets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(assets)


@pytest.fixture(autouse=True, scope="module")
def msmarco(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assets.lay_out_msmarco(home, assets.fresh_ir_datasets(monkeypatch, home))
        yield home


def test_trains_on_triples_validates_on_dev_small_tests_on_judged_trec_dl():
    splits = MsMarcoPassage().load()
    assert list(splits.tests) == ["trec-dl-2019", "trec-dl-2020"]
    assert splits.train.queries == assets.TRAIN_QUERIES
    assert splits.train.qrels == assets.TRAIN_QRELS
    assert list(splits.train.triples) == assets.TRIPLES
    assert splits.val.queries == assets.DEV_QUERIES and splits.val.qrels == assets.DEV_QRELS
    dl19 = splits.tests["trec-dl-2019"]
    assert set(dl19.queries) == {"156493", "1110199"}  # the third query is not judged
    assert dl19.qrels == assets.DL19_QRELS
    assert splits.tests["trec-dl-2020"].qrels == assets.DL20_QRELS


def test_binary_measures_of_trec_dl_start_at_grade_2_those_of_msmarco_at_1():
    splits = MsMarcoPassage().load()
    assert [collection.relevance for collection in (splits.train, splits.val, *splits.tests.values())] == [1, 1, 2, 2]


def test_triples_can_be_read_again_and_limited():
    triples = MsMarcoPassage(max_triples=3).load().train.triples
    assert list(islice(triples, 2)) == assets.TRIPLES[:2]
    assert list(triples) == list(triples) == assets.TRIPLES[:3]


@pytest.mark.parametrize("limit", [None, 1, 3, 99])
def test_triples_as_arrays_are_the_same_triples(limit, monkeypatch):
    monkeypatch.setattr("ranker.data.separated.whole_lines.__defaults__", (20,))  # bytes at a time: some lines
    train = MsMarcoPassage(max_triples=limit).load().train
    blocks = list(train.triples.id_arrays())
    rows = [tuple(word.decode() for word in row) for block in blocks for row in zip(*block, strict=True)]
    assert rows == assets.TRIPLES[:limit] and (limit == 1 or len(blocks) > 1)
    without = TriplesWithout(train.triples, frozenset({"121352", "other"}))
    rest = [tuple(word.decode() for word in row) for block in without.id_arrays() for row in zip(*block, strict=True)]
    assert rest == list(without) == [triple for triple in assets.TRIPLES[:limit] if triple[0] != "121352"]


def test_passages_are_read_from_the_text_file_or_from_a_store_that_is_there(msmarco):
    assert isinstance(docs_of("msmarco-passage"), TsvDocs)
    assert not (msmarco / "msmarco-passage/collection.tsv.pklz4").exists(), "no second copy of the texts"
    through_store = IrDatasetsDocs("msmarco-passage")
    (msmarco / "msmarco-passage/collection.tsv").rename(msmarco / "away.tsv")
    try:
        docs = docs_of("msmarco-passage")
    finally:
        (msmarco / "away.tsv").rename(msmarco / "msmarco-passage/collection.tsv")
    again = docs_of("msmarco-passage")
    assert isinstance(docs, IrDatasetsDocs) and isinstance(again, TsvDocs)
    assert docs.fingerprint == again.fingerprint == through_store.fingerprint
    assert list(docs) == list(again)
    ids = np.array([b"7", b"8", b"0", b"70"])
    assert docs.known(ids).tolist() == again.known(ids).tolist() == [True, False, True, False]
    assert "70" not in docs and "70" not in again, "ir_datasets' index cuts it to 7"
    with pytest.raises(KeyError):
        docs["70"]


def test_all_splits_share_one_corpus_of_string_ids():
    splits = MsMarcoPassage().load()
    docs = splits.train.docs
    assert splits.val.docs is docs and all(collection.docs is docs for collection in splits.tests.values())
    assert [doc.doc_id for doc in docs] == list(assets.PASSAGES) and len(docs) == 8
    assert docs["2"].text == assets.PASSAGES["2"]
    assert docs["2"].title == "" and "8" not in docs and 2 not in docs
    with pytest.raises(KeyError):
        docs["8"]


def test_pc29_double_encoding_is_mended_by_ir_datasets_and_only_there():
    assert "let\u2019s go there" in MsMarcoPassage().load().train.docs["1"].text


def test_official_candidates_have_no_scores_and_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        val = (
            MsMarcoPassage(
                candidates={
                    "msmarco-passage/dev/small": "scoreddocs",
                    "msmarco-passage/trec-dl-2019/judged": "bm25",
                    "msmarco-passage/trec-dl-2020/judged": "bm25",
                }
            )
            .load()
            .val
        )
    assert val.candidates["2"] == ["5", "2"] and val.candidates["1048585"] == ["7", "1"]  # by doc id descending
    assert val.candidates.scores_of("2").tolist() == [0.0, 0.0]
    assert "its scoreddocs have no scores" in caplog.text


def test_bm25_by_default_leaves_candidates_to_the_first_stage():
    splits = MsMarcoPassage().load()
    assert splits.val.candidates is None and all(collection.candidates is None for collection in splits.tests.values())


def test_fewer_validation_queries_are_the_same_ones_each_time():
    first, second = MsMarcoPassage(val_queries=1).load().val, MsMarcoPassage(val_queries=1).load().val
    assert len(first.queries) == 1 and first.queries == second.queries and set(first.qrels) == set(first.queries)


def test_training_without_triples_keeps_judged_queries_for_bm25():
    train = MsMarcoPassage(train_candidates="bm25").load().train
    assert train.triples is None and train.candidates is None and set(train.queries) == set(assets.TRAIN_QRELS)


def test_null_train_only_evaluates():
    splits = MsMarcoPassage(train=None).load()
    assert splits.train is None and splits.val is not None


def test_mistakes_are_named():
    with pytest.raises(
        DataError, match=r"an id that ir_datasets knows, got 'msmarco-passage/trec-dl-2018/judged'; did you mean"
    ):
        MsMarcoPassage(test=["trec-dl-2018/judged"]).load()
    with pytest.raises(ConfigError, match=r"data.candidates: expected scoreddocs, bm25, null .* got 'bm52'"):
        MsMarcoPassage(candidates="bm52")
    with pytest.raises(ConfigError, match=r"data.max_triples: expected a number above 0 or null, got 0"):
        MsMarcoPassage(max_triples=0)
