"""Faults from outside: signals, dead processes, a full disk, values that are not finite.

Each fault ends with one line, and nothing hangs.
"""

import csv
import json
import os
import subprocess
import threading
import time

import pytest
import torch
from commands import run_folder

from ranker.hashing import mix
from ranker.training.checkpoint_files import fault
from ranker.training.nonfinite import read_dump

SMALL = [
    "encoder=tiny",
    "encoder.dropout=0.1",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_epochs=1",
    "optim.lr=3e-3",
    "depth=5",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
    "name=small",
]
TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def choices(small_files, tmp_path_factory):
    return [*SMALL, f"data.path={small_files}", f"cache_dir={tmp_path_factory.mktemp('cache')}"]


def errors(done) -> list[str]:
    assert "Traceback" not in done.out, done.out
    return [line for line in done.out.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("target", "name", "code", "message"),
    [
        (0, "SIGTERM", 75, "error: stopped by SIGTERM after step 3, which is saved"),
        ("child", "SIGKILL", 1, "error: another process of this run has ended"),
        (0, "SIGKILL", -9, ""),
    ],
)
def test_processes_that_lightning_starts_end_together(forks, choices, tmp_path, target, name, code, message):
    signals = [[0, target, name, "open", ".last.ckpt.partial", 2, 0.0]]
    real_child = (target, name) == (0, "SIGKILL")  # it watches its parent itself; else a forked one does the same
    done = forks.run("train.py", *choices, *TWO, cwd=tmp_path, signals=signals, preloaded=not real_child)
    assert done.seconds < 60 or os.getloadavg()[0] > 4  # the result comes after every process has ended
    if "terminated with code -9" in done.out:  # on a busy machine Lightning's watch is faster than the collective
        assert target == "child" and done.code in (1, -9)
    else:
        assert done.code == code, done.out
        if message:  # a killed first process prints nothing; the process that it started may
            (line,) = errors(done)
            assert line.startswith(message)
    assert fault(run_folder(tmp_path) / "checkpoints/last.ckpt") is None


def test_an_error_on_the_first_device_ends_all_and_is_printed_once(forks, choices, tmp_path):
    run = tmp_path / "run"

    def obstruct() -> None:
        while not (run / "config.yaml").is_file():
            time.sleep(0.01)
        (run / "evaluation").write_text("a file where a folder should be")

    threading.Thread(target=obstruct, daemon=True).start()
    done = forks.run("train.py", *choices, *TWO, "trainer.max_steps=1", f"hydra.run.dir={run}", cwd=tmp_path, devices=2)
    assert done.codes == [1, 1], done.out
    (line,) = errors(done)
    assert "evaluation" in line


def test_pc67_more_processes_than_queries(forks, choices, small_files, tmp_path):
    data = tmp_path / "few"
    data.mkdir()
    for name in ("docs.jsonl", "queries.tsv"):
        (data / name).symlink_to(small_files / name)
    for split, first in (("train", 0), ("dev", 3), ("test", 6)):
        (data / f"qrels.{split}.txt").write_text("".join(f"q{i} 0 d{i} 1\n" for i in range(first, first + 3)))
    folders = []
    for devices in (1, 4):
        where = tmp_path / str(devices)
        where.mkdir()
        # PC-82: a relative path
        layout = [f"trainer.devices={devices}", "trainer.accelerator=cpu", "encoder.dropout=0", "data.path=../few"]
        done = forks.run("train.py", *choices, *layout, cwd=where, devices=devices)
        assert done.codes == [0] * devices, done.out
        folders.append(run_folder(where))
    runs = [
        [line.split() for line in (folder / "evaluation/few/run.trec").read_text().splitlines()] for folder in folders
    ]
    assert [row[:4] for row in runs[0]] == [row[:4] for row in runs[1]]
    assert {row[0] for row in runs[1]} == {"q6", "q7", "q8"}
    assert len(runs[1]) == len({(row[0], row[2]) for row in runs[1]}) == len(runs[0])
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[0]["objective"] == pytest.approx(results[1]["objective"], abs=1e-6)


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(forks, choices, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3200k", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        if mounted:  # last.ckpt, best.ckpt or previous.ckpt, and a new checkpoint do not fit together
            done = forks.run("train.py", *choices, f"hydra.run.dir={disk / 'run'}", cwd=tmp_path)
            message, kept = "No space left on device", disk / "run"
        else:  # without the right to mount: limit files to the size of the first checkpoint, which another run wrote
            done = forks.run(
                "train.py", *choices, "trainer.max_steps=1", f"hydra.run.dir={disk / 'first'}", cwd=tmp_path
            )
            assert done.code == 0, done.out
            done = forks.run(
                "train.py",
                f"checkpoint={disk / 'first'}",
                "resume=true",
                "trainer.max_steps=3",
                f"hydra.run.dir={disk / 'run'}",
                cwd=tmp_path,
                limit=500_000,
            )
            message, kept = "File too large", disk / "run"
        assert done.code == 1, done.out
        (line,) = errors(done)
        assert message in line and "the previous checkpoint is kept" in line
        assert fault(kept / "checkpoints/last.ckpt") is None
        assert not list(kept.glob("checkpoints/.*"))  # the incomplete file is gone
        assert torch.load(kept / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)["global_step"] >= 1
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_a_study_on_a_full_disk_is_one_line_and_goes_on_with_room(forks, choices, tmp_path, limit):
    pytest.importorskip("optuna")
    search = [
        *("-m", "sweep=optuna_monobert", *choices, "loss=lce", "trainer.max_steps=1", "optim.lr=interval(1e-4, 1e-2)"),
        *("hydra.sweeper.n_trials=1", f"hydra.sweep.dir={tmp_path / 'search'}"),
    ]
    done = forks.run("train.py", *search, cwd=tmp_path, limit=limit)
    assert done.code == 1, done.out
    (line,) = errors(done)
    assert "study.db: expected a place to write to, got 'disk I/O error'; make room; the study is kept" in line
    done = forks.run("train.py", *search, cwd=tmp_path)
    assert done.code == 0, done.out


@pytest.fixture(scope="module")
def taught(choices, small_files, tmp_path_factory):
    """A training with a teacher whose margins overflow for one query: their squared error exceeds float32."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.trec"
    rows = []
    for i in range(24):
        scores = [3e38 if i == 5 else 3.0, *((-3e38 if i == 5 else -0.1) * (1 + j / 60) for j in range(59))]
        scores = [max(score, -3.4e38) for score in scores]
        rows += [f"q{i} Q0 d{(i + j) % 60} {j + 1} {score!r} t\n" for j, score in enumerate(scores)]
    path.write_text("".join(rows))
    return [*choices, "loss=margin_mse", f"data.teacher={path}"]


# True: as on a GPU, where the host checks a step during the next one
fused = pytest.mark.parametrize("fused", [False, True])


@fused
def test_pc53_a_loss_that_is_not_finite_stops_with_step_and_queries_and_can_be_repeated(forks, taught, tmp_path, fused):
    done = forks.run("train.py", *taught, f"optim.fused={fused}", cwd=tmp_path)
    assert done.code == 1
    (line,) = errors(done)
    (dump,) = (run_folder(tmp_path) / "nonfinite").iterdir()
    about = json.loads((dump / "dump.json").read_text())
    assert "q5" in about["query_ids"] and len(about["query_ids"]) == 4
    where = f"at step {about['step']} (epoch 0, step {about['step']} of this epoch)"
    assert f"{where}, queries {', '.join(about['query_ids'])}" in line
    assert f"python -m ranker replay {dump}" in line
    assert not {path.suffix for path in dump.iterdir()} - {".json", ".safetensors", ".yaml"}
    again = forks.run("ranker/commands/replay.py", str(dump), cwd=tmp_path)
    assert again.code == 0, again.out
    assert (
        f"loss {about['loss']}, gradient norm {about['grad_norm']}; the training had loss {about['loss']}" in again.out
    )
    assert about["loss"] in ("inf", "nan")
    # the weights before the step equal those of the last checkpoint
    weights = read_dump(dump)[1]
    kept = torch.load(run_folder(tmp_path) / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)
    assert kept["global_step"] == about["step"]
    assert all(torch.equal(weights[key], value) for key, value in kept["state_dict"].items())


@fused
def test_a_step_is_skipped_on_all_devices_and_nothing_is_touched(forks, taught, tmp_path, fused):
    skip = [*taught, *TWO, "nonfinite=skip", "callbacks=none", f"optim.fused={fused}"]
    done = forks.run("train.py", *skip, cwd=tmp_path, devices=2)
    assert done.codes == [0, 0], done.out
    folder = run_folder(tmp_path)
    (dump,) = (folder / "nonfinite").iterdir()
    step, _, about = read_dump(dump)
    assert done.out.count("; skipped") == 1
    result = json.loads((folder / "result.json").read_text())
    assert (result["steps"], result["skipped_steps"]) == (6, 1)
    with (folder / "metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("train/loss")]
    assert [row["step"] for row in rows if row["train/loss"] in ("inf", "nan")] == [str(about["step"])]
    assert [float(row["train/skipped_steps"]) for row in rows] == [float(i >= about["step"] + fused) for i in range(6)]
    # the dump has the parts of both devices with their dropout seeds; one device repeats the same loss
    assert about["devices"] == 2
    counts = [
        len(json.loads((dump / f"device-{device}.json").read_text())["fields"]["micro_batches"]) for device in (0, 1)
    ]
    assert list(step.seeds) == [
        int(mix(0, 0, about["step"], i, device)) % 2**63 for device in (0, 1) for i in range(counts[device])
    ]
    again = forks.run("ranker/commands/replay.py", str(dump), cwd=tmp_path)
    assert again.code == 0, again.out
    assert (
        f"loss {about['loss']}, gradient norm {about['grad_norm']}; the training had loss {about['loss']}" in again.out
    )
    # a training that ends with the skipped step: its last checkpoint differs from the previous one only in step counts
    (tmp_path / "short").mkdir()
    done = forks.run("train.py", *skip, f"trainer.max_steps={about['step'] + 1}", cwd=tmp_path / "short", devices=2)
    assert done.codes == [0, 0], done.out
    before, after = (
        torch.load(run_folder(tmp_path / "short") / "checkpoints" / name, map_location="cpu", weights_only=True)
        for name in ("previous.ckpt", "last.ckpt")
    )
    assert (before["global_step"], after["global_step"]) == (about["step"], about["step"] + 1)
    assert all(torch.equal(before["state_dict"][key], value) for key, value in after["state_dict"].items())
    states = [part["optimizer_states"][0]["state"] for part in (before, after)]
    assert all(
        torch.equal(states[0][i][key], value) for i, values in states[1].items() for key, value in values.items()
    )
    assert (before["skipped_steps"], after["skipped_steps"]) == (0, 1)


@pytest.mark.parametrize("override", ["trainer.profiler=foo", "trainer.max_time=abc", "trainer.accelerator=gpu"])
def test_what_lightning_refuses_is_one_line(forks, choices, tmp_path, override):
    done = forks.run("train.py", *choices, override, cwd=tmp_path)
    assert done.code == 1
    (line,) = errors(done)
    assert line.startswith(
        ("error: trainer.", "error: trainer: expected values that Lightning accepts, got Lightning's error: ")
    )
    assert not list(tmp_path.rglob("config.yaml")) or all(
        ".hydra" in path.parts for path in tmp_path.rglob("config.yaml")
    )
