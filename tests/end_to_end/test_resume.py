"""Killed in the middle of an epoch, a training goes on where it stood: the same losses and, bit by bit, the same weights."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import ROOT, run, run_folder
from safetensors.torch import load_file

CHOICES = [
    "encoder=tiny", "encoder.dropout=0.1", "data=files", "batch.queries=4", "batch.docs=4", "trainer.max_epochs=3", "optim.lr=3e-3", "depth=5",
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "save_every_steps=1",
]  # fmt: skip


def losses(folder) -> dict[int, str]:
    with (folder / "metrics.csv").open() as lines:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(lines) if row.get("train/loss")}


@pytest.mark.parametrize(("kill_after", "layout"), [(4, []), (11, []), (8, ["trainer.devices=2", "trainer.accelerator=cpu"])])
def test_pc71_pc77_a_killed_training_goes_on_exactly(small_files, tmp_path, kill_after, layout):
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    for folder in (whole, first, second):
        folder.mkdir()
    assert run("train.py", *CHOICES, *layout, f"data.path={small_files}", cwd=whole).returncode == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "train.py"), *CHOICES, *layout, f"data.path={small_files}"]
    process = subprocess.Popen(
        command, cwd=first, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    reached = 0
    while reached < kill_after and process.poll() is None:
        time.sleep(0.02)
        for last in first.glob("outputs/*/*/checkpoints/last.ckpt"):
            reached = torch.load(last, map_location="cpu", weights_only=True)["global_step"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed = run_folder(first)
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*") if path.is_file()}
    done = run("train.py", f"checkpoint={killed}", "resume=true", cwd=second)
    assert done.returncode == 0, done.stderr
    expected, resumed = run_folder(whole), run_folder(second)
    assert {path: path.stat().st_mtime_ns for path in killed.rglob("*") if path.is_file()} == before
    both = losses(resumed)
    assert 0 < len(both) < 18
    assert both == {step: loss for step, loss in losses(expected).items() if step in both}
    assert max(both) == 17
    one, other = (load_file(folder / "model/model.safetensors") for folder in (expected, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_another_model_can_not_be_resumed_into(small_files, tmp_path):
    done = run("train.py", *CHOICES, f"data.path={small_files}", "trainer.max_epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "other").mkdir()
    done = run("train.py", f"checkpoint={run_folder(tmp_path)}", "resume=true", "loss=ranknet", cwd=tmp_path / "other")
    assert done.returncode == 1
    assert "loss: expected the choice of the run that is resumed, got 'loss=ranknet'" in done.stderr


def test_pc77_the_best_so_far_goes_along(tmp_path):
    from ranker.training.checkpointing import SaveBest

    first, second = (SaveBest(tmp_path / name, "val/nDCG@10") for name in ("first", "second"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first/best.ckpt").write_bytes(b"weights")
    first.best_model_path, first.best_model_score = str(tmp_path / "first/best.ckpt"), torch.tensor(0.5)
    second.load_state_dict(first.state_dict())
    assert (tmp_path / "second/best.ckpt").read_bytes() == b"weights"
    assert second.best_model_path == str(tmp_path / "second/best.ckpt")
    assert not second.check_monitor_top_k(
        type("T", (), {"strategy": type("S", (), {"reduce_boolean_decision": lambda self, x: x})()})(), torch.tensor(0.4)
    )
    assert (tmp_path / "first/best.ckpt").exists()
