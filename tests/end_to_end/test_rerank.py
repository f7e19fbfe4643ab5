"""`ranker rerank`: the scores of the run that a training wrote, from files and from pipes; mistakes in one line."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from commands import run_all

from ranker import Reranker
from ranker.cli.main import main
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_run
from tests.assets.forked import forked

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
RERANK = ["ranker/__main__.py", "rerank", "checkpoint=@outputs/own/*", *CPU]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("rerank")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    texts = [f"queries={small_files / 'queries.tsv'}", f"docs={small_files / 'docs.jsonl'}"]
    first = f"run=@outputs/own/*/evaluation/{small_files.name}/run.trec"
    (where / "unknown.trec").write_text("q1 Q0 d1 1 2 x\nq1 Q0 nowhere 2 1 x\n")
    train = ["train.py", "name=own", "data=files", f"data.path={small_files}", "depth=6", "encoder=tiny", "logger=none"]
    commands = {
        "train": [*train, "trainer.max_steps=2", "report=none", "batch.queries=4", "batch.docs=3", *CPU],
        "all": [*RERANK, "name=all", first, *texts],
        "some": [*RERANK, "name=some", first, *texts, "depth=4", "top_k=2"],
        "no texts": [*RERANK, first],
        "unknown": [*RERANK, "run=unknown.trec", *texts],
    }
    return run_all(commands, where, forks=forks)


def the_run(where, name, small_files):
    folder = next((where / "outputs" / name).iterdir())
    return read_run(folder / ("run.trec" if name != "own" else f"evaluation/{small_files.name}/run.trec"))


def test_a_run_is_re_ranked_to_the_scores_of_the_training(done, where, small_files):
    assert done["all"]["code"] == 0, done["all"]["out"]
    ours, expected = (the_run(where, name, small_files) for name in ("all", "own"))
    assert ours.keys() == expected.keys()
    for query_id, docs in expected.items():
        assert ours[query_id] == pytest.approx(docs, abs=1e-5)


def test_depth_cuts_before_and_top_k_after(done, where, small_files):
    assert done["some"]["code"] == 0, done["some"]["out"]
    some, full = (the_run(where, name, small_files) for name in ("some", "own"))
    for query_id, docs in full.items():  # the run is its own first stage, so its order stays
        assert list(some[query_id]) == sorted(docs, key=docs.get, reverse=True)[:2]


def test_python_and_a_pipe_give_the_same(done, where, small_files):
    queries, docs = read_queries(small_files / "queries.tsv"), JsonlDocs(small_files / "docs.jsonl")
    run = the_run(where, "own", small_files)
    folder = next((where / "outputs/own").iterdir())
    reranker = Reranker.load(folder, accelerator="cpu")
    lines = []
    for query_id, scores in run.items():
        ranking = reranker.rank(queries[query_id], [docs[doc_id] for doc_id in scores])
        assert {doc.doc_id: doc.score for doc in ranking} == pytest.approx(scores, abs=1e-5)
        texts = [{"id": doc_id, "text": docs[doc_id].text} for doc_id in scores]
        lines.append(json.dumps({"query_id": query_id, "query": queries[query_id], "docs": texts}))
    (where / "lines").write_text("\n".join([lines[0], "", *lines[1:], '{"query": "x"}\n']))

    def pipe() -> None:
        os.chdir(where)
        os.dup2(os.open("lines", os.O_RDONLY), 0)
        sys.stdin, sys.argv = os.fdopen(0), ["ranker", "rerank", f"checkpoint={folder}", *CPU]
        with Path("errors").open("w") as sys.stderr, pytest.raises(SystemExit, match=r"^1$"):
            main()

    piped = forked(pipe, re.compile("$^"))
    answers = [json.loads(line) for line in piped.splitlines()]
    assert [answer["query_id"] for answer in answers] == list(run)
    for answer in answers:
        scores = {doc["id"]: doc["score"] for doc in answer["results"]}
        assert scores == pytest.approx(run[answer["query_id"]], abs=1e-5)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert (where / "errors").read_text().splitlines()[-1] == (
        f'error: standard input:{len(lines) + 2}: expected a list as "docs", got None'
    )
    assert not list((where / "outputs/rerank").iterdir())  # no run folder is left


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no texts", "error: docs: expected the file with the docs of run="),
        ("unknown", "docs.jsonl: expected doc 'nowhere' of query 'q1' in "),
    ],
)
def test_mistakes_are_one_line(done, name, message):
    assert done[name]["code"] == 1 and message in done[name]["err"] and "Traceback" not in done[name]["err"]
