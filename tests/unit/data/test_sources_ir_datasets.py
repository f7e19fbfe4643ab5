import importlib.util
import json
import logging
import multiprocessing
import os
import time
import zlib
from pathlib import Path

import pytest

from ranker.data.collection import Collection
from ranker.data.ir_datasets_docs import IrDatasetsDocs
from ranker.data.sources.files import Files
from ranker.data.sources.ir_datasets import IrDatasets
from ranker.data.trec import read_qrels, write_run
from ranker.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("ir_datasets_home", ROOT / "tests" / "assets" / "ir_datasets_home.py")
assets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(assets)
SHARED = assets.shared_data()
pytestmark = pytest.mark.skipif(SHARED is None, reason="the folder shared/data with real collections is not there")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    assets.lay_out_small(home)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assets.fresh_ir_datasets(monkeypatch, home)
        yield home


def test_scifact_equals_its_copy_in_files(home):
    ours = IrDatasets(train="beir/scifact/train", test=["beir/scifact/test"]).load()
    files = Files(str(SHARED / "scifact")).load()
    assert ours.train.docs.fingerprint == files.train.docs.fingerprint
    assert list(ours.tests) == ["scifact"]
    assert ours.tests["scifact"].qrels == files.tests["scifact"].qrels
    assert ours.tests["scifact"].queries == files.tests["scifact"].queries
    # the same seeded hash cuts validation in both
    assert ours.val.queries == files.val.queries and ours.train.queries == files.train.queries
    assert (len(ours.train.queries), len(ours.val.queries)) == (728, 81)
    assert ours.train.docs is ours.tests["scifact"].docs
    assert ours.train.candidates is None  # BM25 makes them


def test_cranfield_grades_are_turned_round_and_said(home, caplog):
    with caplog.at_level(logging.INFO):
        cranfield = IrDatasets(test=["cranfield"]).load().tests["cranfield"]
    raw = read_qrels(SHARED / "cranfield" / "qrels.txt")
    assert cranfield.qrels["1"]["184"] == 3 and raw["1"]["184"] == 2  # "a high degree of relevance" in cranqrel.readme
    assert cranfield.qrels["2"]["12"] == 4 and raw["2"]["12"] == 1  # "a complete answer to the question"
    assert cranfield.qrels["1"]["13"] == 1 and raw["1"]["13"] == 4  # "of minimum interest"
    assert cranfield.qrels["1"]["486"] == raw["1"]["486"] == -1
    relevant = {
        query_id: {d for d, grade in judged.items() if grade >= 1} for query_id, judged in cranfield.qrels.items()
    }
    assert relevant == {
        query_id: {d for d, grade in judged.items() if grade >= 1} for query_id, judged in raw.items()
    }  # binary: as ever
    assert "grades run backwards" in caplog.text


def test_docs_of_every_kind_keep_title_and_text_as_the_data_set_gives_them(home):
    import ir_datasets

    for dataset_id, count in (("cranfield", 1400), ("beir/scifact", 5183)):
        docs = IrDatasetsDocs(dataset_id)
        assert len(docs) == count
        for ours, theirs in zip(docs, ir_datasets.load(dataset_id).docs_iter(), strict=True):
            assert ours.doc_id == theirs.doc_id
            assert ours.full_text == (theirs.default_text() if theirs.title else theirs.text)
    assert docs["4983"].title.startswith("Microstructural development") and docs["4983"].text.startswith(
        "Alterations of the architecture"
    )
    assert "4983" in docs and "nowhere" not in docs and 4983 not in docs


def test_several_tests_on_several_corpora(home):
    splits = IrDatasets(test=["vaswani", "cranfield", "beir/scifact/test"], relevance={"cranfield": 3}).load()
    assert {name: len(collection.queries) for name, collection in splits.tests.items()} == {
        "vaswani": 93,
        "cranfield": 225,
        "scifact": 300,
    }
    assert {name: collection.relevance for name, collection in splits.tests.items()} == {
        "vaswani": 1,
        "cranfield": 3,
        "scifact": 1,
    }
    assert splits.train is None and splits.val is None


def test_candidates_from_a_run_file(home, tmp_path):
    write_run(tmp_path / "a.run", {query_id: {"1": 1.0, "2": 2.0} for query_id in map(str, range(1, 94))})
    test = IrDatasets(test=["vaswani"], candidates={"vaswani": str(tmp_path / "a.run")}).load().tests["vaswani"]
    assert test.candidates["7"] == ["2", "1"]
    write_run(tmp_path / "b.run", {"1": {"1": 1.0, "no-such-doc": 2.0}})
    with pytest.raises(
        DataError, match=r"b.run:1: expected candidates from the collection, got the unknown doc id 'no-such-doc'"
    ):
        IrDatasets(test=["vaswani"], candidates={"vaswani": str(tmp_path / "b.run")}).load()


def test_training_on_test_queries_is_refused(home):
    with pytest.raises(DataError, match=r"vaswani: expected queries that train lacks, got \d+ that both have"):
        IrDatasets(train="vaswani", test=["vaswani"]).load()


def test_equal_query_numbers_of_different_collections_are_no_overlap(home):
    splits = IrDatasets(train="vaswani", test=["cranfield"]).load()
    assert set(splits.train.queries) & set(splits.tests["cranfield"].queries)


def test_mistakes_are_named(home):
    with pytest.raises(
        DataError, match=r"expected an id that ir_datasets knows, got 'beir/scifac/test'; did you mean beir/sci"
    ):
        IrDatasets(test=["beir/scifac/test"]).load()
    with pytest.raises(DataError, match=r"vaswani: expected docpairs, got a set without"):
        IrDatasets(train="vaswani", train_candidates="docpairs").load()
    with pytest.raises(DataError, match=r"vaswani: expected scoreddocs, got a set without"):
        IrDatasets(test=["vaswani"], candidates="scoreddocs").load()
    with pytest.raises(ConfigError, match=r"data.test: expected each id once"):
        IrDatasets(test=["vaswani", "vaswani"])
    with pytest.raises(ConfigError, match=r"data.relevance: expected ids .* got 'vaswini'"):
        IrDatasets(test=["vaswani"], relevance={"vaswini": 2})
    with pytest.raises(
        DataError, match=r"train: expected more judged training queries than the 93 to validate on, got 93"
    ):
        IrDatasets(train="vaswani", val_queries=93).load()


def test_what_cannot_be_downloaded_is_one_line(home, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(
        DataError, match=r"^ir_datasets antique/test: expected to read it, got \w+: .*; check the network[^\n]*$"
    ):
        IrDatasets(test=["antique/test"]).load()


def test_fingerprint_is_remembered_until_the_store_changes(home):
    import ir_datasets

    first = IrDatasetsDocs("vaswani").fingerprint
    memory = Path(ir_datasets.load("vaswani").docs_store().path) / "ranker_fingerprint.json"
    remembered = {**json.loads(memory.read_text()), "fingerprint": "remembered", "crc32": zlib.crc32(b"remembered")}
    memory.write_text(json.dumps(remembered))
    assert IrDatasetsDocs("vaswani").fingerprint == "remembered"
    os.utime(memory.parent / "bin", ns=(0, 0))
    assert IrDatasetsDocs("vaswani").fingerprint == first


def test_pc34_a_store_without_its_index_is_built_anew(home, caplog):
    import ir_datasets

    folder = Path(ir_datasets.load("vaswani").docs_store().path)
    for index in folder.glob("idx.*"):
        index.unlink()  # as if killed between writing positions and index
    docs = IrDatasetsDocs("vaswani")
    assert "is unfinished" in caplog.text
    assert len(docs) == 11429 and docs["11429"].doc_id == "11429"


def test_pc34_processes_that_start_together_build_once(tmp_path, monkeypatch):
    assets.lay_out_small(tmp_path)
    ir_datasets = assets.fresh_ir_datasets(monkeypatch, tmp_path)
    lookup = ir_datasets.indices.lz4_pickle.Lz4PickleLookup
    build = lookup.transaction

    def slow_build(self):
        with (tmp_path / "builds").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return build(self)

    def load(start, results):
        start.wait()
        docs = IrDatasets(test=["cranfield"]).load().tests["cranfield"].docs
        results.put((docs.fingerprint, len(docs), docs["1400"].doc_id))

    monkeypatch.setattr(lookup, "transaction", slow_build)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=load, args=(start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert (tmp_path / "builds").read_text() == "x"
    assert len(set(got)) == 1 and got[0][1:] == (1400, "1400")


def test_docs_survive_a_fork_that_reads_at_the_same_time(home):
    docs = IrDatasetsDocs("vaswani")
    docs["1"]  # opens the file in the parent
    if (child := os.fork()) == 0:
        right = all(docs[str(number)].doc_id == str(number) for number in range(1, 3000))
        os._exit(0 if right else 1)
    assert all(docs[str(number)].doc_id == str(number) for number in range(3000, 6000))
    assert os.waitpid(child, 0)[1] == 0


def test_collections_are_typed(home):
    test = IrDatasets(test=["vaswani"]).load().tests["vaswani"]
    assert isinstance(test, Collection) and all(isinstance(key, str) for key in (*test.queries, *test.qrels))
