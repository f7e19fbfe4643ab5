"""`data=rows` through the commands: a training, an evaluation whose run holds the rows' docs, a kill and a resume."""

import json
import random

import pytest
from commands import by_start, run_folder
from test_resume import assert_same_end, losses

from ranker.data.trec import read_run

SHORT = ["encoder=tiny", "encoder.dropout=0.1", "batch.queries=4", "batch.docs=4", "depth=5",
         "trainer.enable_progress_bar=false", "report=none", "trainer.log_every_n_steps=1", "name=rows"]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Scored lists to train on, labelled pairs to test on."""
    folder, rng = tmp_path_factory.mktemp("rows"), random.Random(0)
    words = [f"word{i}" for i in range(30)]

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / name)

    def docs():
        return [" ".join(rng.choices(words, k=6)) for _ in range(5)]

    train = [{"query": f"query {i}", "docs": docs(), "scores": [rng.gauss(0, 3) for _ in range(5)]} for i in range(40)]
    tests = [
        {"query": f"test {i}", "document": doc, "label": 2 * (place == 0)}
        for i in range(6)
        for place, doc in enumerate(docs())
    ]
    return {"train": write("train.jsonl", train), "test": write("test.jsonl", tests), "rows": tests}


def test_two_steps_and_an_evaluation(forks, files, tmp_path):
    arguments = [f"data.train={files['train']}", f"data.test={{mine: {files['test']}}}", "loss=mse", *SHORT]
    done = forks.run("train.py", "data=rows", *arguments, "trainer.max_steps=2", cwd=tmp_path)
    assert done.code == 0, done.out
    assert "rows of the shape list (query=query, docs=docs, scores=scores)" in done.out
    folder = run_folder(tmp_path)
    assert len(losses(folder)) == 2
    run = read_run(folder / "evaluation/mine/run.trec")
    assert len(run) == 6 and all(len(docs) == 5 for docs in run.values())
    first = json.loads((folder / "evaluation/mine/metrics.json").read_text())
    assert first["measures"]["R@100"] == 1.0, "the relevant doc is among the row's docs"

    pairs = ["data=rows", f"data.test={files['test']}", "data.relevance=2", "name=again", "depth=5"]
    done = forks.run("evaluate.py", f"checkpoint={folder}", *pairs, cwd=tmp_path)
    assert done.code == 0, done.out
    (again,) = by_start(tmp_path / "outputs/again")
    assert read_run(again / "evaluation/rows/run.trec").keys() == run.keys()
    train = ["split=train", "name=train", "depth=5", "report=none"]
    done = forks.run("evaluate.py", f"checkpoint={folder}", *train, cwd=tmp_path)
    assert done.code == 0, done.out
    (train,) = by_start(tmp_path / "outputs/train")
    assert len(read_run(train / "evaluation/train/run.trec")) == 36, "four of 40 queries are for validation"


def test_two_processes_and_a_small_budget_give_the_same_losses(forks, files, tmp_path):
    arguments = ["data=rows", f"data.train={files['train']}", "loss=mse", *SHORT, "trainer.max_steps=6"]
    layouts = {"one": [], "two": ["trainer.devices=2", "trainer.accelerator=cpu"], "small": ["batch.max_tokens=400"]}
    logged = {}
    for name, options in layouts.items():
        (tmp_path / name).mkdir()
        done = forks.run("train.py", *arguments, *options, cwd=tmp_path / name, devices=2 if name == "two" else 1)
        assert set(done.codes) == {0}, done.out
        logged[name] = [float(loss) for loss in losses(run_folder(tmp_path / name)).values()]
    assert len(logged["one"]) == 6 and len(set(logged["one"])) == 6
    assert logged["two"] == pytest.approx(logged["one"], rel=1e-4)
    assert logged["small"] == pytest.approx(logged["one"], rel=1e-4)


def test_killed_and_resumed(forks, files, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    arguments = ["data=rows", f"data.train={files['train']}", "loss=kl", *SHORT, "trainer.max_epochs=2",
                 "save_every_steps=1", f"cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    done = forks.run("train.py", *arguments, cwd=whole)
    assert done.code == 0, done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 5, 0.0]
    done = forks.run("train.py", *arguments, cwd=killed, signals=[kill])
    assert done.code == -9, done.out
    first = run_folder(killed)
    done = forks.run("train.py", f"checkpoint={first}", "resume=true", cwd=killed)
    assert done.code == 0, done.out
    last = by_start(killed / "outputs/rows")[-1]
    assert_same_end(run_folder(whole), last)
    assert losses(first, last) == losses(run_folder(whole)) and len(losses(last)) < 18


def test_faults_are_reported_before_the_training(forks, files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "a", "docs": ["b"], "scores": [NaN]}\n')
    done = forks.run("train.py", "data=rows", f"data.train={bad}", *SHORT, cwd=tmp_path)
    assert done.code == 1 and f"{bad}:1: column 'scores': expected a finite number as score, got nan" in done.out
    assert "Traceback" not in done.out
    done = forks.run("train.py", "data=rows", f"data.train={tmp_path}/none.parquet", *SHORT, cwd=tmp_path)
    assert done.code == 1 and "data.train: expected files, got" in done.out


def test_in_batch_negatives_are_refused_beside_scores(forks, files, tmp_path):
    done = forks.run("train.py", "data=rows", f"data.train={files['train']}", "model=dpr", *SHORT, cwd=tmp_path)
    assert done.code == 1 and "model.in_batch_negatives: expected false with rows that have a teacher's" in done.out
    assert "Traceback" not in done.out
    arguments = ["model=dpr", "model.in_batch_negatives=false", "loss=margin_mse", *SHORT, "trainer.max_steps=2"]
    done = forks.run("train.py", "data=rows", f"data.train={files['train']}", *arguments, cwd=tmp_path)
    assert done.code == 0, done.out
