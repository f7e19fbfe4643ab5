"""Sparse rankers from the command line: train, resume, search, explain, re-rank from an index, probe; mistakes."""

import json
import shutil

import numpy as np
import pytest
import torch
from commands import run_all
from safetensors.torch import load_file

from ranker.data.trec import read_qrels, read_run

SMALL = ["encoder=tiny", "encoder.dropout=0.1", "data=files", "data.path={data}", "batch.queries=8", "batch.docs=4",
         "optim.lr=3e-3", "depth=20", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1",
         "report=none"]  # fmt: skip
TRAIN = ["train.py", *SMALL, "save_every_steps=1"]
SEARCH = ["search.py", "index=sparse", "encode.shard_docs=16", "latency_queries=3"]
BM25 = ["search.py", "data=files", "data.path={data}", "latency_queries=0"]
DF = ["model=splade", "model.regularizer=df_flops", "model.doc_penalty=0.01", "trainer.max_steps=4"]
COMMANDS = {
    "splade": [*TRAIN, *DF, "name=splade"],
    "idf": [*TRAIN, "model=splade", "model.queries=idf", "name=idf", "trainer.max_steps=2"],
    "tildev2": [*TRAIN, "model=tildev2", "name=tildev2", "trainer.max_steps=3"],
    "found": [*SEARCH, "checkpoint=@outputs/splade/*", "name=found", "mine=train", "mining.count=5", "explain=q33,d33"],
    "again": ["evaluate.py", "checkpoint=@outputs/splade/*", "name=again", "report=none"],
    "eight bits": [*SEARCH, "checkpoint=@outputs/idf/*", "name=bits", "index.quantized=true"],
    "bm25": [*BM25, "model=bm25", "name=bm25", "depth=10", "explain=q33,d33"],
    "tfidf": [*BM25, "model=tfidf", "name=tfidf"],
    "teacher": [*BM25, "model=bm25", "name=teacher", "split=train"],
    "taught": ["train.py", *SMALL[2:], "name=taught", "model=splade", "checkpoint=@outputs/splade/*",
               "trainer.max_steps=2", "loss=margin_mse", "data.teacher=@outputs/teacher/*/evaluation/train/run.trec"],
    "re-ranked": [*SEARCH, "checkpoint=@outputs/tildev2/*", "name=reranked",
                  "candidates=@outputs/bm25/*/evaluation/small/run.trec"],
    "probe": ["probe.py", "probe=tf", "checkpoint=@outputs/splade/*", "data=files", "data.path={data}", "name=probed",
              "split=test", "docs_per_query=2", "seeds=[1]", "layers=[1]", "portions=[0.2,1.0]",
              "training.max_rounds=1", "training.hidden=8"],
    "dense index": ["search.py", "checkpoint=@outputs/splade/*", "index=flat"],
    "dense candidates": [*BM25, "model=bm25", "candidates=@outputs/bm25/*/evaluation/small/run.trec"],
    "one id": [*SEARCH, "checkpoint=@outputs/splade/*", "explain=q33"],
    "no such query": [*SEARCH, "checkpoint=@outputs/splade/*", "explain=q99,d33"],
    "no such doc": [*BM25, "model=bm25", "explain=q33,d99"],
    "regularizer": ["train.py", *SMALL, "model=splade", "model.regularizer=l2"],
}  # fmt: skip
MISTAKES = {
    "dense index": "index: expected sparse for SPLADE, got flat; set index=sparse",
    "dense candidates": "candidates: expected null with model=...",
    "no such query": "explain: expected a query id and a doc id that one set contains; not found: query 'q99'",
    "no such doc": "explain: expected a query id and a doc id that one set contains; not found: doc 'd99'",
    "one id": "explain: expected QUERY_ID,DOC_ID, got 'q33'",
    "regularizer": "model.regularizer: expected one of flops, l1, df_flops; got 'l2'",
}


def test_train_search_explain_probe_and_mistakes(forks, tmp_path, small_files, subtests):
    """Run all of `COMMANDS` in one process; one test, so that they run once on any number of test workers."""
    data = tmp_path / "small"
    shutil.copytree(small_files, data)
    commands = {name: [argument.format(data=data) for argument in command] for name, command in COMMANDS.items()}
    results = run_all(commands, tmp_path, forks=forks)
    for name, result in results.items():
        if name not in MISTAKES:
            assert result["code"] == 0, f"{name}: {result['out'][-3000:]}"
    for check in (
        a_search_reports_terms_and_products, re_ranking_gives_the_scores_of_the_search,
        the_terms_of_a_pair_add_up_to_its_score, candidates_are_ranked_from_the_index, the_probe_has_results,
    ):  # fmt: skip
        with subtests.test(check.__name__):
            check(tmp_path)
    for name, message in MISTAKES.items():
        with subtests.test(name):
            assert results[name]["code"] == 1 and message in results[name]["err"], results[name]["out"]
            assert results[name]["left"] == []


def folder_of(where, name):
    (folder,) = (where / "outputs" / name).iterdir()
    return folder


def run_of(where, name):
    return read_run(folder_of(where, name) / "evaluation/small/run.trec")


def a_search_reports_terms_and_products(where):
    figures = json.loads((folder_of(where, "found") / "search.json").read_text())["small"]
    assert figures["docs"] == 60 and figures["query_terms"] > 0 and figures["doc_terms"] > 0 and figures["flops"] > 0
    assert figures["latency_ms"]["p50"] > 0 and figures["parts_ms"]["encode"]["p50"] > 0
    bits = json.loads((folder_of(where, "bits") / "search.json").read_text())["small"]
    entries = round(bits["doc_terms"] * 60)
    words = len(load_file(folder_of(where, "idf") / "model/query_0_SparseStaticEmbedding/model.safetensors")["weight"])
    assert bits["index_bytes"] == 8 * (words + 1) + entries * (4 + 1)
    mined, qrels = read_run(folder_of(where, "found") / "negatives.trec"), read_qrels(where / "small/qrels.train.txt")
    assert all(len(docs) == 5 and not set(docs) & set(qrels[query_id]) for query_id, docs in mined.items())


def re_ranking_gives_the_scores_of_the_search(where):
    again, found = run_of(where, "again"), run_of(where, "found")
    for query_id, docs in again.items():
        shared = {doc_id: found[query_id][doc_id] for doc_id in docs if doc_id in found[query_id]}
        assert {doc_id: docs[doc_id] for doc_id in shared} == pytest.approx(shared, rel=1e-4)


def the_terms_of_a_pair_add_up_to_its_score(where):
    for name in ("found", "bm25"):
        told = json.loads((folder_of(where, name) / "explain.json").read_text())
        assert (told["query_id"], told["doc_id"]) == ("q33", "d33")
        assert told["score"] == pytest.approx(sum(term["query"] * term["doc"] for term in told["terms"]))
        assert told["score"] == pytest.approx(run_of(where, name)["q33"]["d33"], rel=1e-4)


def candidates_are_ranked_from_the_index(where):
    ranked, candidates = run_of(where, "reranked"), run_of(where, "bm25")
    assert {query_id: set(docs) for query_id, docs in ranked.items()} == {
        query_id: set(docs) for query_id, docs in candidates.items()
    }
    assert np.std(list(next(iter(ranked.values())).values())) > 0


def the_probe_has_results(where):
    assert list((where / "outputs").glob("probed/*/*.csv")) or list((where / "outputs").glob("probed/*/*.json"))


def test_a_resumed_training_ends_with_the_same_weights(forks, tmp_path, small_files):
    options = [argument.format(data=small_files) for argument in [*TRAIN, *DF][1:]]
    whole = forks.run("train.py", *options, "name=whole", cwd=tmp_path)
    assert whole.code == 0, whole.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 3, 0.0]
    killed = forks.run("train.py", *options, "name=killed", cwd=tmp_path, signals=[kill])
    assert killed.code == -9, killed.out
    again = forks.run("train.py", f"checkpoint={folder_of(tmp_path, 'killed')}", "resume=true", cwd=tmp_path)
    assert again.code == 0, again.out
    resumed = max((tmp_path / "outputs/killed").iterdir(), key=lambda run: (run / "config.yaml").stat().st_mtime_ns)
    states = [
        torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for folder in (folder_of(tmp_path, "whole"), resumed)
    ]
    assert states[0]["frequencies"].max() > 0 and states[0]["averaged"] == 4
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name
