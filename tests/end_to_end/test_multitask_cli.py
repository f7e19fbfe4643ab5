"""model=multitask from the command line: train, evaluate, probe, resume after a kill; refused labels."""

import csv
import json
from itertools import pairwise

import pytest
import torch
from commands import run_folder
from safetensors.torch import load_file

SMALL = [
    "model=multitask",
    "encoder=tiny",
    "encoder.dropout=0.1",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_epochs=2",
    "optim.lr=3e-3",
    "depth=5",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
    "name=small",
    "model.weighting.cosine_every=2",
    "model.weighting.mode=uncertainty",
    "model.weighting.surgery=guard",
    "model.head_dropout=0.2",
    "model.heads=[{task: bm25, layer: 1, options: {bins: 4}}, {task: tf, layer: middle, regression: true}]",
]


@pytest.fixture(scope="module")
def choices(small_files, tmp_path_factory):
    return [*SMALL, f"data.path={small_files}", f"cache_dir={tmp_path_factory.mktemp('cache')}"]


@pytest.fixture(scope="module")
def trained(forks, choices, tmp_path_factory):
    where = tmp_path_factory.mktemp("trained")
    done = forks.run("train.py", *choices, cwd=where)
    assert done.code == 0, done.out
    return run_folder(where)


def logged(folder):
    with (folder / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_losses_rows_and_cosines_are_logged(trained):
    rows = [row for row in logged(trained) if row["train/loss"]]
    losses = [row for row in logged(trained) if row["train/loss/ranking"]]
    assert [row["step"] for row in rows] == [row["step"] for row in losses] == [str(step) for step in range(12)]
    assert all(float(row["train/loss/ranking"]) > 0 for row in losses)
    for name in ("bm25", "tf"):
        seen = [0.0, *(float(row[f"rows/{name}"]) for row in rows)]
        has_rows = [after > before for before, after in pairwise(seen)]  # steps with rows of the task
        assert [bool(row[f"train/loss/{name}"]) for row in losses] == has_rows
        assert [bool(row[f"cosine/{name}"]) for row in losses] == [
            rows_seen and step % 2 == 1 for step, rows_seen in enumerate(has_rows)
        ]
        assert sum(has_rows) > 6
    # 24 groups of 4 docs; one row in 5 is auxiliary: 24 auxiliary rows per epoch
    last = rows[-1]
    assert float(last["rows/ranking"]) == 2 * 24 * 4 and float(last["rows/bm25"]) + float(last["rows/tf"]) == 2 * 24
    cosines = [row["cosine/bm25"] for row in losses]
    assert all(-1 <= float(value) <= 1 for value in cosines if value)
    assert float(last["weight/tf"]) != float(rows[0]["weight/tf"])


def test_it_evaluates_and_probes_as_any_other_model(forks, choices, trained, tmp_path):
    assert {path.name for path in (trained / "model").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "heads.json",
        "heads.safetensors",
        "ranker.yaml",
    }
    done = forks.run("evaluate.py", f"checkpoint={trained}", "report=none", cwd=tmp_path)
    assert done.code == 0, done.out
    again = run_folder(tmp_path)
    one, other = (
        json.loads(next(folder.glob("evaluation/*/metrics.json")).read_text())["measures"]
        for folder in (trained, again)
    )
    assert one == pytest.approx(other, abs=1e-6)
    (tmp_path / "last").mkdir()
    done = forks.run("evaluate.py", f"checkpoint={trained}", "weights=last", "report=none", cwd=tmp_path / "last")
    assert done.code == 0, done.out
    (tmp_path / "probe").mkdir()
    options = [
        "probe=tf",
        "controls=[]",
        "seeds=[0]",
        "portions=[0.5,1.0]",
        "training.max_rounds=1",
        "workers=1",
        "split=train",
    ]
    done = forks.run(
        "probe.py",
        f"checkpoint={trained}",
        *choices[-2:-1],
        "data=files",
        *options,
        choices[-1],
        cwd=tmp_path / "probe",
    )
    assert done.code == 0, done.out
    with (run_folder(tmp_path / "probe") / "probe_results.csv").open() as lines:
        assert {row["layer"] for row in csv.DictReader(lines)} == {"0", "1", "2"}


def test_a_killed_training_goes_on_exactly(forks, choices, trained, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    killed = forks.run(
        "train.py", *choices, cwd=tmp_path / "first", signals=[[0, 0, "SIGKILL", "open", ".last.ckpt.partial", 6, 0.0]]
    )
    assert killed.code == -9
    done = forks.run("train.py", f"checkpoint={run_folder(tmp_path / 'first')}", "resume=true", cwd=tmp_path / "second")
    assert done.code == 0, done.out
    resumed = run_folder(tmp_path / "second")
    for name in ("model.safetensors", "heads.safetensors"):
        one, other = (load_file(folder / "model" / name) for folder in (trained, resumed))
        assert all(torch.equal(one[key], other[key]) for key in one)
    states = [
        torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for folder in (trained, resumed)
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in ("weights.log_variance", "rows_seen"))


def test_labels_on_test_queries_are_refused(forks, choices, small_files, tmp_path):
    texts = dict(line.split("\t") for line in (small_files / "queries.tsv").read_text().splitlines())
    record = {
        "info": {"qid": "mine", "pid": "d"},
        "input": {"query": texts["q33"], "passage": "b"},
        "targets": [{"span1": {"side": "doc"}, "label": "A"}],
    }
    (tmp_path / "labels.jsonl").write_text(json.dumps(record) + "\n")
    heads = (
        f"model.heads=[{{task: jsonl, layer: 1, classes: [A, B], options: {{path: '{tmp_path / 'labels.jsonl'}'}}}}]"
    )
    done = forks.run("train.py", *choices, heads, cwd=tmp_path)
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: model.heads.jsonl: expected labels on training queries only, got 1 queries of ")
    assert not list(tmp_path.glob("outputs/*/*"))


def test_layers_that_the_encoder_lacks_are_refused_before_a_step(forks, choices, tmp_path):
    done = forks.run("train.py", *choices, "model.heads=[{task: bm25, layer: 5}]", cwd=tmp_path)
    assert done.code == 1
    assert "model.heads.bm25.layer: expected 0 (the embeddings) to 2 for this encoder, got 5" in done.out
