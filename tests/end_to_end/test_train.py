"""A training from the command line: its files, measures that others can recompute, and equality with two processes."""

import csv
import json

import numpy as np
import pytest
import pytrec_eval
from commands import run_folder
from omegaconf import OmegaConf

from ranker.assembly.data import build_data, load_splits
from ranker.checkpoint import load_scorer

SMALL = [
    "encoder=tiny",
    "data=files",
    "batch.queries=8",
    "batch.docs=4",
    "trainer.max_epochs=2",
    "optim.lr=3e-3",
    "depth=20",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
]


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory, small_files):
    where = tmp_path_factory.mktemp("trained")
    done = forks.run("train.py", *SMALL, f"data.path={small_files}", "name=one", cwd=where)
    assert done.code == 0, done.out
    return where, run_folder(where), done


def test_the_run_folder_holds_all_that_is_promised(trained, small_files):
    _, folder, done = trained
    for name in (
        "config.yaml", "environment.json", "train.log", "metrics.csv", "result.json",
        "checkpoints/last.ckpt", "checkpoints/best.ckpt",
        "model/config.json", "model/model.safetensors", "model/tokenizer.json", "model/ranker.yaml",
    ):  # fmt: skip
        assert (folder / name).stat().st_size > 0, name
    result = json.loads((folder / "result.json").read_text())
    metrics = json.loads((folder / f"evaluation/{small_files.name}/metrics.json").read_text())
    assert result["measures"] == {small_files.name: metrics["measures"]}
    assert metrics["num_queries"] == 8
    assert result["steps"] == 6
    assert result["best_step"] in (3, 6) and result["skipped_steps"] == 0 and result["monitor"] == "val/nDCG@10"
    assert 0 <= result["data_wait_share"] < 1 and result["padding_share"] == 0
    assert 0 < result["train_seconds"] < result["seconds"] and result["peak_memory_bytes"] > 2**26
    # 24 groups of 4 docs in two epochs, without the first 3 steps; a pair has 10 to 200 tokens
    assert result["pairs_per_second"] * (result["train_seconds"] - result["start_seconds"]) == pytest.approx(
        96, rel=1e-3
    )
    assert 10 < result["tokens_per_second"] / result["pairs_per_second"] < 200
    with (folder / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    assert len(losses) == 6 and all(0 < loss < 5 for loss in losses)
    rates = [float(row["optim/lr"]) for row in rows if row.get("optim/lr")]
    assert rates == pytest.approx([3e-3 * factor for factor in (1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])
    assert max(float(row["val/nDCG@10"]) for row in rows if row.get("val/nDCG@10")) == pytest.approx(
        result["objective"]
    )
    assert "nDCG@10" in done.out
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"]


def test_outside_tools_get_the_same_numbers_from_the_run_file(trained, small_files):
    _, folder, _ = trained
    evaluation = folder / "evaluation" / small_files.name
    run_rows = [line.split() for line in (evaluation / "run.trec").read_text().splitlines()]
    ranked: dict[str, dict[str, float]] = {}
    for query, _, doc, rank, score, _ in run_rows:
        ranked.setdefault(query, {})[doc] = float(score)
        assert int(rank) == len(ranked[query])
    qrels = {}
    for line in (small_files / "qrels.test.txt").read_text().splitlines():
        query, _, doc, grade = line.split()
        qrels[query] = {doc: int(grade)}
    assert len(run_rows) == len({(row[0], row[2]) for row in run_rows})
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.100"}).evaluate(ranked)
    measures = json.loads((evaluation / "metrics.json").read_text())["measures"]
    assert measures["nDCG@10"] == pytest.approx(
        sum(values["ndcg_cut_10"] for values in theirs.values()) / len(qrels), abs=1e-9
    )
    assert measures["AP@100"] == pytest.approx(
        sum(values["map_cut_100"] for values in theirs.values()) / len(qrels), abs=1e-9
    )
    per_query = [json.loads(line) for line in (evaluation / "per_query.jsonl").read_text().splitlines()]
    assert {row["query_id"] for row in per_query} == qrels.keys()


def test_sentence_transformers_gives_the_scores_of_the_run(trained, small_files):
    from sentence_transformers import CrossEncoder

    _, folder, _ = trained
    docs = {row["id"]: row["text"] for row in map(json.loads, (small_files / "docs.jsonl").read_text().splitlines())}
    queries = dict(line.split("\t") for line in (small_files / "queries.tsv").read_text().splitlines())
    rows = [line.split() for line in (folder / "evaluation" / small_files.name / "run.trec").read_text().splitlines()][
        :40
    ]
    scores = CrossEncoder(str(folder / "model"), device="cpu").predict(
        [(queries[row[0]], docs[row[2]]) for row in rows]
    )
    assert scores.tolist() == pytest.approx([float(row[4]) for row in rows], abs=1e-5)


def assert_pictures(folder, name):
    """The folder has the pictures that compare the run with its baseline."""
    assert {path.name for path in (folder / "pictures").iterdir()} == {f"{name}_gains.png", f"{name}_ranks.png"}
    assert all(path.stat().st_size > 2_000 for path in (folder / "pictures").iterdir())


def test_evaluate_repeats_the_test_and_compares_runs(forks, trained, small_files, tmp_path):
    _, folder, _ = trained
    written = (folder / "evaluation" / small_files.name / "run.trec").read_text().split("\n")
    for checkpoint in (folder, folder / "model"):
        where = tmp_path / checkpoint.name
        where.mkdir()
        done = forks.run(
            "evaluate.py", f"checkpoint={checkpoint}", "name=one", "trainer.enable_progress_bar=false", cwd=where
        )
        assert done.code == 0, done.out
        again = (run_folder(where) / "evaluation" / small_files.name / "run.trec").read_text().split("\n")
        assert again == written
        assert_pictures(run_folder(where), small_files.name)
    where = tmp_path / "file"
    where.mkdir()
    trec = folder / "evaluation" / small_files.name / "run.trec"
    done = forks.run(
        "evaluate.py", f"run={trec}", f"qrels={small_files / 'qrels.test.txt'}", f"baseline={trec}", cwd=where
    )
    assert done.code == 0, done.out
    assert_pictures(run_folder(where), "run")
    metrics = json.loads((run_folder(where) / "evaluation/run/metrics.json").read_text())
    expected = json.loads((folder / "evaluation" / small_files.name / "metrics.json").read_text())["measures"]
    assert metrics["measures"] == pytest.approx(expected, abs=1e-12)
    assert metrics["comparison"]["nDCG@10"]["delta"] == 0
    assert metrics["comparison"]["nDCG@10"]["p_value"] == 1


def test_pc73_an_encoder_without_a_head_is_not_evaluated(forks, tmp_path, small_files):
    from ranker.encoders.loading import load_encoder

    load_encoder("tiny").model.save_pretrained(tmp_path / "headless")
    done = forks.run(
        "evaluate.py", f"checkpoint={tmp_path / 'headless'}", "data=files", f"data.path={small_files}", cwd=tmp_path
    )
    assert done.code == 1
    assert "its head would be random" in done.out
    assert "Traceback" not in done.out


TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]


def test_pc64_pc68_two_processes_leave_one_run_with_the_same_numbers(forks, trained, small_files, tmp_path):
    _, folder, _ = trained
    small = "batch.eval_max_tokens=400"  # otherwise all pairs form one batch, which the first process scores alone
    done = forks.run("train.py", *SMALL, *TWO, small, f"data.path={small_files}", "name=one", cwd=tmp_path, devices=2)
    assert done.codes == [0, 0], done.out
    both = run_folder(tmp_path)
    splits = load_splits(OmegaConf.load(both / "config.yaml"))
    data = build_data(OmegaConf.load(both / "config.yaml"), splits, load_scorer(both / "model"))
    for collection in (splits.val, *splits.tests.values()):
        parts = [data.score_batches(collection, rank, 2) for rank in range(2)]
        assert not any(part.stand_in for part in parts) and sum(map(len, parts)) >= 4
    one, two = (json.loads((path / "result.json").read_text()) for path in (folder, both))
    assert two["objective"] == pytest.approx(one["objective"], abs=1e-6)
    assert two["steps"] == one["steps"]
    runs = [(path / "evaluation" / small_files.name / "run.trec").read_text().splitlines() for path in (folder, both)]
    assert len(runs[0]) == len(runs[1])
    for name in ("train/loss", "train/grad_norm", "optim/lr"):
        logged = []
        for path in (folder, both):
            with (path / "metrics.csv").open() as lines:
                logged.append([float(row[name]) for row in csv.DictReader(lines) if row.get(name)])
        assert logged[1] == pytest.approx(logged[0], rel=1e-4), name
    assert [line.split()[:4] for line in runs[0]] == [line.split()[:4] for line in runs[1]]
    # AdamW follows rounding noise where the true gradient is 0; this holds for the head's bias, which shifts all scores
    # equally
    one, two = (np.array([float(line.split()[4]) for line in run]) for run in runs)
    np.testing.assert_allclose(two - two.mean(), one - one.mean(), rtol=0, atol=1e-4)


def test_max_steps_below_an_epoch_still_validates(forks, small_files, tmp_path):
    done = forks.run("train.py", *SMALL, f"data.path={small_files}", "trainer.max_steps=2", cwd=tmp_path)
    assert done.code == 0, done.out
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["steps"] == result["best_step"] == 2
    assert result["objective"] is not None


@pytest.mark.parametrize("devices", [1, 2])
def test_pc68_early_stopping_watches_the_ir_measure_and_stops_all_devices_at_one_epoch(
    forks, small_files, tmp_path, devices
):
    layout = TWO if devices == 2 else []
    done = forks.run(
        "train.py",
        *SMALL,
        *layout,
        f"data.path={small_files}",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=1",
        "optim.lr=0",
        "trainer.max_epochs=6",
        "depth=5",
        cwd=tmp_path,
        devices=devices,
    )
    assert done.codes == [0] * devices, done.out
    # at rate 0 nothing changes: the second validation is no better than the first, and an epoch has 3 steps
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["steps"] == 6
    assert sorted(path.name for path in run_folder(tmp_path).rglob("*.ckpt")) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    ]
