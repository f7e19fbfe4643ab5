"""Bi-encoders from the command line: train, search, mine, a second round, a teacher; refused commands."""

import json
import shutil
import subprocess
import sys

import pytest
from commands import ROOT, run_all

from ranker.data.trec import read_qrels, read_run
from ranker.evaluation.metrics import evaluate

ROUND = ["data=files", "data.path={data}", "batch.queries=8", "batch.docs=4", "optim.lr=3e-3", "depth=20",
         "trainer.enable_progress_bar=false", "report=none", "logger=none"]  # fmt: skip
SMALL = ["encoder=tiny", *ROUND]
SEARCH = ["search.py", "report=none", "encode.shard_docs=16"]
TEACHER = "data.teacher=@outputs/teacher/*/evaluation/train+positives/run.trec"
COMMANDS = {
    "dpr": ["train.py", *SMALL, "model=dpr", "name=dpr", "trainer.max_steps=4"],
    "colbert": [
        "train.py",
        *SMALL,
        "model=colbert",
        "name=colbert",
        "trainer.max_steps=4",
        "model.in_batch_negatives=true",
    ],
    "flat": [*SEARCH, "checkpoint=@outputs/dpr/*", "name=flat", "mine=train", "mining.count=7", "latency_queries=3"],
    "again": ["evaluate.py", "checkpoint=@outputs/dpr/*", "name=again", "report=none"],
    "second": [
        "train.py",
        *ROUND,
        "name=second",
        "checkpoint=@outputs/dpr/*",
        "data.negatives=@outputs/flat/*/negatives.trec",
        "trainer.max_steps=2",
    ],
    "other model": ["train.py", *ROUND, "model=colbert", "name=other", "checkpoint=@outputs/dpr/*"],
    "other weights": [*SEARCH, "checkpoint=@outputs/second/*", "encode.folder=@.cache/encoded/*"],
    "mono": ["train.py", *SMALL, "model=monobert", "name=mono", "trainer.max_steps=2"],
    "teacher": [
        "evaluate.py",
        "checkpoint=@outputs/mono/*",
        "name=teacher",
        "split=train",
        "add_positives=true",
        "report=none",
        "depth=5",
    ],
    "positives": [
        "evaluate.py",
        "checkpoint=@outputs/dpr/*",
        "name=positives",
        "split=train",
        "add_positives=true",
        "report=none",
        "depth=1",
    ],
    "taught": [
        "train.py",
        *ROUND,
        "name=taught",
        "loss=margin_mse",
        "model=colbert",
        "model.in_batch_negatives=null",
        "checkpoint=@outputs/colbert/*",
        "trainer.max_steps=2",
        TEACHER,
    ],
    "taught by kl": [
        "train.py",
        *ROUND,
        "name=kl",
        "loss=kl",
        "checkpoint=@outputs/dpr/*",
        "trainer.max_steps=2",
        TEACHER,
    ],
    "rescored": [
        "evaluate.py",
        "checkpoint=@outputs/mono/*",
        "name=rescored",
        "split=train",
        "add_positives=true",
        "report=none",
        "candidates=@outputs/flat/*/negatives.trec",
    ],
    "second and taught": [
        "train.py",
        *ROUND,
        "name=both_rounds",
        "loss=margin_mse",
        "checkpoint=@outputs/dpr/*",
        "trainer.max_steps=2",
        "data.negatives=@outputs/flat/*/negatives.trec",
        "data.teacher=@outputs/rescored/*/evaluation/train+positives/run.trec",
    ],
    "late": [
        *SEARCH,
        "checkpoint=@outputs/taught/*",
        "name=late",
        "index=hnsw",
        "encode.dtype=float16",
        "late.candidates=30",
    ],
    "bm25": ["search.py", "model=bm25", "data=files", "data.path={data}", "name=bm25"],
    "in-batch and a teacher": ["train.py", *SMALL, "model=dpr", "model.in_batch_negatives=true", "name=both", TEACHER],
    "spaces": ["search.py", "model=bm25", "data=files", "data.path={data}/../spaces", "name=spaces"],
    "nothing": ["search.py"],
    "no data": ["search.py", "model=bm25"],
    "untrained": ["search.py", "model=dpr", "data=files", "data.path={data}"],
    "index": ["search.py", "model=bm25", "index=flatt"],
    "mining": ["search.py", "model=bm25", "mining.first=0", "data=files", "data.path={data}"],
    "split": ["search.py", "model=bm25", "split=tests", "data=files", "data.path={data}"],
    "bm25 trained": ["train.py", *SMALL, "model=bm25"],
}
INDEXES = sorted(path.stem for path in (ROOT / "conf/index").glob("*.yaml"))
MISTAKES = {
    "other model": "model: expected the model of checkpoint=",
    "other weights": "was computed with other weights, tokenizer or pooling: scorer: expected",
    "in-batch and a teacher": "model.in_batch_negatives: expected false or null with data.teacher",
    "spaces": "'d 33'",
    "nothing": "search.py: expected either checkpoint=RUN_FOLDER or model=bm25, got neither",
    "no data": "data: expected data=...",
    "untrained": "model: expected bm25 or tfidf, or checkpoint=RUN_FOLDER of a trained model",
    "index": f"index: expected one of {', '.join(INDEXES)}; got 'flatt'",
    "mining": "mining.first: expected 1 to mining.last=100, got 0",
    "split": "split: expected one of test, val, train",
    "bm25 trained": "model: expected one that can be trained, got ranker.retrieval.bm25.BM25",
}


def test_train_search_mine_teach_and_mistakes(forks, tmp_path, small_files, subtests):
    """Run all of `COMMANDS` in one process; one test, so that they run once on any number of test workers."""
    data = tmp_path / "small"
    shutil.copytree(small_files, data)
    shutil.copytree(small_files, tmp_path / "spaces")
    docs = tmp_path / "spaces/docs.jsonl"
    docs.write_text(docs.read_text().replace('"d33"', '"d 33"'))
    commands = {name: [argument.format(data=data) for argument in command] for name, command in COMMANDS.items()}
    results = run_all(commands, tmp_path, forks=forks)
    for name, result in results.items():
        if name not in MISTAKES:
            assert result["code"] == 0, f"{name}: {result['out'][-3000:]}"
    assert "p50" in results["flat"]["out"]
    for check in (
        a_search_leaves_a_run_its_measures_and_its_costs, re_ranking_gives_the_scores_of_the_search,
        mined_negatives_hold_no_positive_and_train_a_second_round, a_teachers_scores_teach,
        bm25_through_the_same_command_is_the_baseline,
    ):  # fmt: skip
        with subtests.test(check.__name__):
            check(tmp_path)
    for name in MISTAKES:
        with subtests.test(name):
            a_mistake_is_one_line_and_leaves_nothing(tmp_path, results[name], MISTAKES[name])
    with subtests.test("two processes"):
        two_processes_give_the_run_of_one(forks, tmp_path)


def folder_of(where, name):
    (folder,) = (where / "outputs" / name).iterdir()
    return folder


def run_of(where, name, set_name="small"):
    return read_run(folder_of(where, name) / "evaluation" / set_name / "run.trec")


def a_search_leaves_a_run_its_measures_and_its_costs(where):
    found, qrels = run_of(where, "flat"), read_qrels(where / "small/qrels.test.txt")
    # the whole collection, which is smaller than depth
    assert len(found) == 8 and all(len(docs) == 60 for docs in found.values())
    metrics = json.loads((folder_of(where, "flat") / "evaluation/small/metrics.json").read_text())
    assert metrics["measures"] == pytest.approx(evaluate(found, qrels, ["nDCG@10", "RR@10", "AP@100", "R@100"]).means)
    assert metrics["measures"]["R@100"] == 1.0 and metrics["comparison"]["nDCG@10"]["baseline"] > 0.5  # BM25
    costs = json.loads((folder_of(where, "flat") / "search.json").read_text())["small"]
    assert (
        costs["docs"] == 60
        and costs["index_bytes"] == 60 * 32 * 4
        and costs["latency_ms"]["p95"] >= costs["latency_ms"]["p50"] > 0
    )


def re_ranking_gives_the_scores_of_the_search(where):
    again, found, at_the_end_of_training = (run_of(where, name) for name in ("again", "flat", "dpr"))
    for query_id, docs in again.items():
        assert docs == pytest.approx({doc_id: found[query_id][doc_id] for doc_id in docs}, abs=1e-4)
        assert docs == pytest.approx(at_the_end_of_training[query_id], abs=1e-4)


def mined_negatives_hold_no_positive_and_train_a_second_round(where):
    mined, qrels = read_run(folder_of(where, "flat") / "negatives.trec"), read_qrels(where / "small/qrels.train.txt")
    assert len(mined) == 24 and all(
        len(docs) == 7 and not set(docs) & set(qrels[query_id]) for query_id, docs in mined.items()
    )
    assert json.loads((folder_of(where, "second") / "result.json").read_text())["steps"] == 2


def a_teachers_scores_teach(where):
    qrels = read_qrels(where / "small/qrels.train.txt")
    for depth, taught in (
        (5, run_of(where, "teacher", "train+positives")),
        (1, run_of(where, "positives", "train+positives")),
    ):
        assert all(set(qrels[query_id]) <= set(docs) for query_id, docs in taught.items()) and len(taught) == 24
        assert all(len(docs) <= depth + len(qrels[query_id]) for query_id, docs in taught.items())
    for name in ("taught", "kl"):
        assert json.loads((folder_of(where, name) / "result.json").read_text())["steps"] == 2
    assert len(run_of(where, "late")) == 8


def bm25_through_the_same_command_is_the_baseline(where):
    alone, beside = (
        json.loads((folder_of(where, name) / "evaluation/small/metrics.json").read_text()) for name in ("bm25", "dpr")
    )
    assert alone["measures"]["nDCG@10"] == pytest.approx(beside["comparison"]["nDCG@10"]["baseline"], abs=1e-9)


def a_mistake_is_one_line_and_leaves_nothing(where, result, message):
    errors = [line for line in result["out"].splitlines() if line.startswith("error: ")]
    assert result["code"] == 1 and len(errors) == 1 and message in errors[0] and "Traceback" not in result["out"]
    for folder in ("other", "both", "spaces"):
        assert not [
            path for path in (where / "outputs" / folder).rglob("*") if path.is_file() and ".hydra" not in path.parts
        ]


def two_processes_give_the_run_of_one(forks, where):
    shutil.move(where / ".cache/encoded", where / "encoded")
    two = forks.run(
        "search.py",
        f"checkpoint={folder_of(where, 'dpr')}",
        "name=two",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "encode.shard_docs=16",
        "latency_queries=0",
        cwd=where,
        devices=2,
    )
    assert two.codes == [0, 0], two.out[-3000:]
    (both,) = (where / ".cache/encoded").iterdir()
    alone = where / "encoded" / both.name  # equal settings give an equal name
    for shard in range(4):
        for name in ("vectors.bin", "ids.bin"):
            assert (alone / f"shard-{shard:05d}" / name).read_bytes() == (
                both / f"shard-{shard:05d}" / name
            ).read_bytes()
    assert run_of(where, "two") == run_of(where, "flat")


def test_help_imports_no_torch():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "search.py"), "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert shown.returncode == 0 and f"index: {', '.join(INDEXES)}" in shown.stdout
    assert not {"torch", "lightning", "faiss"} & {line.rsplit("|", 1)[-1].strip() for line in shown.stderr.splitlines()}
