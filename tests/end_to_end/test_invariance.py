"""Hardware-invariant training: devices, memory and micro-batches change nothing but rounding (dropout off)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("invariance_run.py")
ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = {
    "tenth of the budget": ["--max-tokens", "420"],
    "three micro-batches": ["--min-micro-batches", "3"],
    "two processes, one empty at a step": ["--devices", "2"],
    "two processes, a tenth of the budget": ["--devices", "2", "--max-tokens", "420"],
}


def train(folder: Path, name: str, *arguments: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    out = folder / name.replace(" ", "-").replace(",", "")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--cache", str(folder / "cache"), "--out", str(out), *arguments]
    # a process group of its own: a hung child of the child would otherwise hold the pipe for ever
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        raise RuntimeError(output)
    kept = json.loads(out.with_suffix(".json").read_text())
    return kept["losses"], torch.load(out.with_suffix(".pt"), weights_only=True), kept["val"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    return folder, train(folder, "float64", "--double"), train(folder, "float32", "--optimizer", "sgd")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[key] - other[key]).abs().max().item() for key in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_losses_equal_to_1e_12_and_weights_to_1e_9(reference, layout):
    folder, (losses, weights, measured), _ = reference
    got_losses, got_weights, got_measured = train(folder, f"64 {layout}", "--double", *LAYOUTS[layout])
    assert got_losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert furthest(got_weights, weights) < 1e-9
    assert got_measured == pytest.approx(measured, abs=1e-12)  # each query once, whoever scored it


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_sgd_losses_equal_to_1e_6_and_weights_to_1e_5(reference, layout):
    folder, _, (losses, weights, _) = reference
    got_losses, got_weights, _ = train(folder, f"32 {layout}", "--optimizer", "sgd", *LAYOUTS[layout])
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert furthest(got_weights, weights) < 1e-5


def test_steps_are_three_an_epoch_and_learn(reference):
    _, (losses, _, _), _ = reference
    assert len(losses) == 6
    assert losses[-1] != losses[2]


@pytest.mark.parametrize(
    ("fault", "layout"),
    [("share", ["--max-tokens", "420"]), ("world", ["--devices", "2"]), ("sync", ["--devices", "2"])],
)
def test_a_seeded_fault_is_seen(reference, fault, layout):
    folder, (_, weights, _), _ = reference
    try:
        _, got_weights, _ = train(folder, f"fault {fault}", "--double", "--fault", fault, *layout)
    except RuntimeError:
        assert fault == "sync"  # one process waits in a reduction that the other never enters
    else:
        assert furthest(got_weights, weights) > 1e-6
