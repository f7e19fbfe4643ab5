"""Which settings become absolute paths."""

import pytest
from omegaconf import OmegaConf

from ranker.config.paths import _parameters, _with_target, make_absolute
from ranker.config.roots import CONF

PLAIN = {
    "checkpoint": "run",
    "compare": "a/b",
    "run": "x.trec",
    "qrels": "../q.txt",
    "candidates": "c.run",
    "cache_dir": ".cache",
    "data": {
        "_target_": "ranker.data.sources.files.Files",
        "path": "coll",
        "negatives": "n.trec",
        "teacher": "t.trec",
    },
    "mining": {"teacher": "t.trec"},
    "encode": {"folder": "vectors"},
}


def absolute(content: dict) -> dict:
    cfg = OmegaConf.create(content)
    make_absolute(cfg)
    return OmegaConf.to_container(cfg)


def test_pc2_17_each_path_key_is_absolute_and_nothing_else_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute(PLAIN) == {
        "checkpoint": f"{tmp_path}/run",
        "compare": f"{tmp_path}/a/b",
        "run": f"{tmp_path}/x.trec",
        "qrels": f"{tmp_path.parent}/q.txt",
        "candidates": f"{tmp_path}/c.run",
        "cache_dir": f"{tmp_path}/.cache",
        "data": {
            "_target_": "ranker.data.sources.files.Files",
            "path": f"{tmp_path}/coll",
            "negatives": f"{tmp_path}/n.trec",
            "teacher": f"{tmp_path}/t.trec",
        },
        "mining": {"teacher": f"{tmp_path}/t.trec"},
        "encode": {"folder": f"{tmp_path}/vectors"},
    }
    assert absolute(absolute(PLAIN)) == absolute(PLAIN)


def test_files_of_rows_are_paths_and_names_of_the_hub_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.parquet", "b.parquet", "docs.jsonl"):
        (tmp_path / name).touch()
    rows = {
        "_target_": "ranker.data.sources.rows.Rows",
        "train": ["a.parquet", "org/name:train"],
        "val": "*.parquet",
        "test": {"mine": ["b.parquet", "c.parquet"], "hub": "org/name"},
        "docs": "docs.jsonl",
        "queries": None,
    }
    assert absolute({"data": rows})["data"] == {
        **rows,
        "train": [f"{tmp_path}/a.parquet", "org/name:train"],
        "val": f"{tmp_path}/*.parquet",
        "test": {"mine": [f"{tmp_path}/b.parquet", "c.parquet"], "hub": "org/name"},
        "docs": f"{tmp_path}/docs.jsonl",
    }
    other = {"_target_": "ranker.data.sources.ir_datasets.IrDatasets", "train": "docs.jsonl"}
    assert absolute({"data": other}) == {"data": other}


def test_words_that_may_be_paths_are_where_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {
        "encoder": {"name": "org/model", "package": None},
        "baseline": "bm25",
        "index": {},
        "data": {"candidates": {"beir/scifact/test": "bm25"}, "train_candidates": "docpairs"},
    }
    assert absolute(words) == words
    for name in ("org/model", "bm25", "docpairs"):
        (tmp_path / name).mkdir(parents=True)
    assert absolute(words) == {
        "encoder": {"name": f"{tmp_path}/org/model", "package": None},
        "baseline": "bm25",
        "index": {},
        "data": {"candidates": {"beir/scifact/test": f"{tmp_path}/bm25"}, "train_candidates": f"{tmp_path}/docpairs"},
    }


@pytest.mark.parametrize(
    "content",
    [
        {"encoder": {"name": "model", "package": "package"}},
        {"encoder": {"name": "tiny", "package": None}},
        {"data": {"_target_": "ranker.data.sources.files.Files", "path": "/a", "candidates": "first.run"}},
        {"data": {"path": "~/coll"}},
        {
            "checkpoint": None,
            "data": None,
            "model": {"heads": [{"task": "bm25", "options": None}]},
            "probe": {"skip": True},
        },
    ],
)
def test_what_does_not_depend_on_the_folder_stays(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "tiny", "first.run"):
        (tmp_path / name).mkdir()
    assert absolute(content) == content


def test_a_probing_task_s_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = {"task": "fact", "options": {"path": "labels"}}
    sem = {"_target_": "ranker.probing.tasks.sem.SemanticSimilarity", "dim": 3}
    auto = {"_target_": "ranker.multitask.options.AutoLayers"}
    got = absolute(
        {
            "probe": {"sem": {**sem, "vectors": "glove.txt"}},
            "model": {"heads": [head], "auto": {**auto, "report": "probed"}},
        }
    )
    assert got == {
        "probe": {"sem": {**sem, "vectors": f"{tmp_path}/glove.txt"}},
        "model": {
            "heads": [{"task": "fact", "options": {"path": f"{tmp_path}/labels"}}],
            "auto": {**auto, "report": f"{tmp_path}/probed"},
        },
    }


def test_parameters_annotated_as_paths_are_those_that_were_listed():
    """A new source or task needs no entry in a list: the annotation of its parameter says that it is a path."""
    paths = set()
    for group in ("data", "probe", "model"):
        for file in (CONF / group).glob("[!_]*.yaml"):
            whole = OmegaConf.create({"batch": {"docs": 4}, group: OmegaConf.load(file)})  # its values name batch.docs
            for _, target in _with_target(whole[group]):
                paths |= {f"{group}/{file.stem}.{name}" for name, part in _parameters(target).items() if part.is_path}
    assert paths == {
        "data/files.path",
        "probe/fact.path",
        "probe/gap.path",
        "probe/jsonl.path",
        "probe/sem.vectors",
        "model/multitask.report",
    }
