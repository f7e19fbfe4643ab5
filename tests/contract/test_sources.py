"""The contract of every data source: one test class over conf/data/*.yaml, which finds a new yaml without an entry.

A source with mandatory options gets them in `OPTIONS`; a source whose yaml needs none has no entry there.
"""

import gzip
import importlib.util
import inspect
import itertools
import json
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from ranker.config.targets import PASSED, SHARED_KEYS
from ranker.data.collection import Splits
from ranker.retrieval.first_stage import with_candidates

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("ir_datasets_home", ROOT / "tests" / "assets" / "ir_datasets_home.py")
assets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(assets)
# mixed.yaml combines sources and has its own tests (tests/unit/data/test_mixed.py, tests/end_to_end/test_mixed.py)
YAMLS = [path for path in sorted((ROOT / "conf" / "data").glob("[!_]*.yaml")) if path.stem != "mixed"]


def node_of(path: Path):
    """The node of a yaml, with the options that all sources share."""
    node = OmegaConf.load(path)
    shared = "_shared" in node.pop("defaults", [])
    return OmegaConf.merge(OmegaConf.load(path.with_name("_shared.yaml")), node) if shared else node


def files_options(folder):
    folder.mkdir()
    with gzip.open(folder / "docs.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({"id": f"{i:02d}", "text": f"text number{i}", "title": f"Title {i % 3}"}) + "\n"
            for i in range(40)
        )
    (folder / "queries.tsv").write_text("".join(f"{i}\tnumber{i} of the texts\n" for i in range(30)))
    (folder / "qrels.txt").write_text("".join(f"{i} 0 {i:02d} 2\n{i} 0 {(i + 1) % 40:02d} 0\n" for i in range(30)))
    return {"path": str(folder)}


def rows_options(folder):
    """Rows of texts: scores to train on, labels to test on."""
    scored = [
        {
            "query": f"number{i} of the texts",
            "docs": [f"text number{j}" for j in range(i, i + 4)],
            "scores": [3, 1, 2, 0],
        }
        for i in range(30)
    ]
    labelled = [
        {"query": f"test {i} of number{i}", "document": f"text number{i + j}", "label": 2 * (j == 0)}
        for i in range(5)
        for j in range(3)
    ]
    for name, rows in (("train", scored), ("test", labelled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "train": str(folder / "train.jsonl"),
        "test": {"labelled": str(folder / "test.jsonl")},
        "cache_dir": str(folder / "cache"),
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options by source, over a home of ir_datasets that needs no network."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assets.lay_out_msmarco(home, assets.fresh_ir_datasets(monkeypatch, home))
        options = {"files": files_options(tmp_path_factory.mktemp("files") / "mine"), "msmarco_passage": {}}
        options["rows"] = rows_options(tmp_path_factory.mktemp("rows"))
        if assets.shared_data() is not None:
            assets.lay_out_small(home)
            options["ir_datasets"] = {"train": "beir/scifact/train", "test": ["beir/scifact/test", "cranfield"]}
        yield options


@pytest.fixture(scope="module", params=YAMLS, ids=lambda path: path.stem)
def loads(request, options):
    """Two loads of the same source, each by an object of its own."""
    node = node_of(request.param)
    if request.param.stem == "ir_datasets" and "ir_datasets" not in options:
        pytest.skip("the folder shared/data with real collections is not there")
    if request.param.stem == "cwe" and importlib.util.find_spec("cwe2") is None:
        pytest.skip("cwe2 (extra demo) is not installed")
    node = OmegaConf.merge(node, options.get(request.param.stem, {}))
    arguments = {key: value for key, value in node.items() if key not in SHARED_KEYS["data"]}
    return [instantiate(arguments).load() for _ in range(2)]


def parts(splits: Splits):
    return [part for part in (splits.train, splits.val, *splits.tests.values()) if part is not None]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_lists_every_argument_with_its_default_and_a_comment(path):
    node = node_of(path)
    target = get_class(node._target_)
    assert node._target_.split(".")[-2] == path.stem and target.__module__ == f"ranker.data.sources.{path.stem}"
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in PASSED.get("data", ())
    }
    assert {key for key in node if not key.startswith("_")} - set(SHARED_KEYS["data"]) == set(parameters)
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty:
            assert OmegaConf.is_missing(node, name)
        else:
            given = OmegaConf.to_container(node)[name]
            assert given == (list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default)
    lines = path.read_text().splitlines()
    keys = [line for line in lines if line.split(":")[0] in parameters]
    assert lines[0].startswith("# ") and len(keys) == len(parameters) and all(" # " in line for line in keys)


def test_there_is_something_to_train_validate_and_test_on(loads):
    splits = loads[0]
    assert splits.train.queries and splits.val.queries and splits.tests
    assert all(name == part.name and part.queries for name, part in splits.tests.items())


def test_ids_and_texts_are_strings(loads):
    for part in parts(loads[0]):
        for query_id, text in part.queries.items():
            assert type(query_id) is str and type(text) is str and query_id.split() == [query_id] and text.strip()
        for query_id, judged in part.qrels.items():
            assert type(query_id) is str and all(
                type(doc_id) is str and type(grade) is int for doc_id, grade in judged.items()
            )
        for doc in itertools.islice(part.docs, 200):
            assert (
                type(doc.doc_id) is str
                and type(doc.text) is str
                and type(doc.title) is str
                and doc.doc_id.split() == [doc.doc_id]
            )


def test_judged_queries_have_texts_and_judged_docs_exist(loads):
    for part in parts(loads[0]):
        assert part.qrels and part.qrels.keys() <= part.queries.keys()
        assert any(doc_id in part.docs for judged in part.qrels.values() for doc_id in judged)
        assert any(grade >= part.relevance for judged in part.qrels.values() for grade in judged.values())


def test_no_query_is_in_two_splits(loads):
    splits = loads[0]
    together = [splits.train, splits.val]
    for part in splits.tests.values():
        assert not any(
            other.queries.get(query_id) == text for other in together for query_id, text in part.queries.items()
        )
    assert not splits.train.queries.keys() & splits.val.queries.keys()


def test_docs_are_found_by_id_and_counted(loads):
    for docs in {id(part.docs): part.docs for part in parts(loads[0])}.values():
        assert sum(1 for _ in docs) == len(docs)
        for doc in itertools.islice(docs, 50):
            assert docs[doc.doc_id] == doc and doc.doc_id in docs
        assert "no such id" not in docs and None not in docs
        with pytest.raises(KeyError):
            docs["no such id"]


def test_two_loads_are_equal(loads):
    first, second = loads
    for one, other in zip(parts(first), parts(second), strict=True):
        assert (one.name, one.queries, one.qrels, one.relevance) == (
            other.name,
            other.queries,
            other.qrels,
            other.relevance,
        )
        assert list(one.queries) == list(other.queries)
        assert one.docs.fingerprint == other.docs.fingerprint


def test_splits_of_one_corpus_share_its_docs(loads):
    docs = {part.docs.fingerprint: set() for part in parts(loads[0])}
    for part in parts(loads[0]):
        docs[part.docs.fingerprint].add(id(part.docs))
    assert all(len(objects) == 1 for objects in docs.values())


def test_triples_come_again_and_name_training_queries(loads):
    train = loads[0].train
    if train.triples is None:
        pytest.skip("this source trains on candidates")
    first, again = list(itertools.islice(train.triples, 1000)), list(itertools.islice(train.triples, 1000))
    assert first and first == again
    assert all(
        query_id in train.queries and more in train.docs and less in train.docs for query_id, more, less in first
    )


def test_every_split_can_be_given_candidates_from_its_corpus(loads, tmp_path):
    filled = with_candidates(loads[0], 5, tmp_path)
    for part in parts(filled):
        if part.triples is not None or (part.rows is not None and part is filled.train):
            continue
        assert set(part.candidates) == set(part.queries)
        for query_id in itertools.islice(part.queries, 50):
            doc_ids = part.candidates[query_id]
            assert len(doc_ids) == len(set(doc_ids)) <= 5 and all(doc_id in part.docs for doc_id in doc_ids)
