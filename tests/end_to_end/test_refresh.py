"""Refreshed negatives: mined with the weights of their step, on any number of devices, and resumed exactly."""

import csv
import json

import numpy as np
import pytest
import torch
from commands import run_all, run_folder
from safetensors.torch import load_file

from ranker.data.trec import read_qrels

TRAIN = [
    "train.py", "model=dpr", "encoder=tiny", "encoder.dropout=0.1", "data=files", "depth=5", "batch.queries=4",
    "batch.docs=4", "optim.lr=3e-3", "schedule=constant", "trainer.max_epochs=-1", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "trainer.precision=64-true", "monitor=null",
    "trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=100", "report=none",
    "mining.every=4", "mining.count=6", "mining.last=8", "save_every_steps=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("refresh")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    train = [*TRAIN, f"data.path={small_files}", f"cache_dir={where}/cache"]
    commands = {
        "four": [*train, "name=four", "trainer.max_steps=4"],
        "whole": [*train, "name=whole", "trainer.max_steps=10"],
        "cut": [*train, "name=cut", "trainer.max_steps=6"],
        "resumed": ["train.py", "checkpoint=@outputs/cut/*", "resume=true", "trainer.max_steps=10", "name=resumed",
                    f"cache_dir={where}/cache"],
        "workers": [*train, "name=workers", "trainer.max_steps=10", "batch.workers=1", "batch.max_tokens=400"],
        "epochs": [*train, "name=epochs", "trainer.max_steps=13", "mining.every=1", "mining.unit=epochs"],
        "monobert": [*[part for part in train if part != "model=dpr"], "model=monobert", "name=monobert",
                     "trainer.max_steps=4"],
        "unit": [*train, "mining.unit=days", "name=unit", "trainer.max_steps=4"],
    }  # fmt: skip
    return run_all(commands, where, forks=forks)


@pytest.fixture(scope="module")
def folders(done, where):
    for name in ("four", "whole", "cut", "resumed", "workers", "epochs"):
        assert done[name]["code"] == 0, done[name]["out"][-3000:]
    return {folder.name: next(folder.iterdir()) for folder in (where / "outputs").iterdir() if any(folder.iterdir())}


def mined(folder, number):
    path = folder / f"mined/round-{number:05d}"
    return np.load(path / "sizes.npy"), np.load(path / "rows.npy")


def losses(folder):
    with (folder / "metrics.csv").open() as lines:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(lines) if row.get("train/loss")}


def apart(one, other):
    weights = [load_file(folder / "model/model.safetensors") for folder in (one, other)]
    return max((weights[0][key] - weights[1][key]).abs().max().item() for key in weights[0])


def test_negatives_are_the_best_docs_for_the_weights_of_that_step(folders, small_files):
    """sentence-transformers encodes the same collection with the weights after four steps."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folders["four"] / "model"), device="cpu")
    docs = {doc["id"]: doc["text"] for doc in map(json.loads, (small_files / "docs.jsonl").open())}
    queries = dict(line.rstrip("\n").split("\t") for line in (small_files / "queries.tsv").open())
    qrels = read_qrels(small_files / "qrels.train.txt")
    similarities = model.encode(list(queries.values())) @ model.encode(list(docs.values())).T
    best = {
        query: np.array(list(docs))[np.argsort(-row)].tolist() for query, row in zip(queries, similarities, strict=True)
    }
    sizes, rows = mined(folders["whole"], 1)
    found = [{list(docs)[row] for row in part} for part in np.split(rows, np.cumsum(sizes)[:-1])]
    expected = [
        {doc for doc in best[query][:8] if judged.get(doc, 0) < 1}
        for query, judged in qrels.items()
        if any(grade >= 1 for grade in judged.values())
    ]
    assert len(found) == len(expected) > 10
    for got, wanted in zip(found, expected, strict=True):
        assert len(got) == min(6, len(wanted)) and got <= wanted


def test_a_resumed_training_ends_with_the_same_bits(folders):
    whole, resumed = folders["whole"], folders["resumed"]
    assert apart(whole, resumed) == 0.0
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step >= 6}
    for number in (1, 2):
        for one, other in zip(mined(whole, number), mined(resumed, number), strict=True):
            np.testing.assert_array_equal(one, other)
    report = json.loads((resumed / "result.json").read_text())["mining"]
    assert report["rounds"] == 2 and report["seconds"] > 0


def test_workers_and_memory_change_nothing(folders):
    assert losses(folders["workers"]) == pytest.approx(losses(folders["whole"]), rel=0, abs=1e-12)
    assert apart(folders["workers"], folders["whole"]) < 1e-9


def test_a_round_may_begin_with_each_epoch(folders):
    assert json.loads((folders["epochs"] / "result.json").read_text())["mining"]["rounds"] == 2  # epochs of 6 steps


def test_two_processes_mine_the_same(forks, folders, where, small_files, tmp_path):
    done = forks.run(
        *TRAIN, f"data.path={small_files}", f"cache_dir={where}/cache", "trainer.devices=2", "trainer.max_steps=6",
        "name=two", cwd=tmp_path, preloaded=True,
    )  # fmt: skip
    assert done.code == 0, done.out
    two = run_folder(tmp_path)
    for one, other in zip(mined(folders["whole"], 1), mined(two, 1), strict=True):
        np.testing.assert_array_equal(one, other)
    assert losses(two) == pytest.approx({s: v for s, v in losses(folders["whole"]).items() if s < 6}, abs=1e-6)
    weights = [torch.load(folder / "checkpoints/last.ckpt", weights_only=True) for folder in (folders["cut"], two)]
    for key, value in weights[0]["state_dict"].items():
        torch.testing.assert_close(value, weights[1]["state_dict"][key], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("monobert", "mining.every: expected null for MonoBERT, which can't search a collection"),
        ("unit", "mining.unit: expected one of steps, epochs; got 'days'"),
    ],
)
def test_mistakes_end_in_one_line(done, name, message):
    assert done[name]["code"] == 1
    assert [line for line in done[name]["out"].splitlines() if line.startswith(f"error: {message}")]
