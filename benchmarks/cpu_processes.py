"""CPU training with one process of several threads, and with several processes of one thread; run by cpu.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]


def ways_of(cores: int) -> dict[str, tuple[int, list[str]]]:
    """Return name -> (threads of each process, overrides), for each way to train on `cores` cores."""
    return {
        f"1 process x {cores} threads": (cores, ["trainer.devices=1"]),
        f"{cores} processes x 1 thread": (1, [f"trainer.devices={cores}", "trainer.strategy=ddp"]),
    }


def command(run: Path, cache: Path, steps: int, layers: int | None, overrides: list[str]) -> list[str]:
    """Return the command of a training of some steps of 64 pairs, without validation and test."""
    return [
        sys.executable, str(ROOT / "train.py"), "encoder=minilm", *([f"encoder.layers={layers}"] if layers else []),
        "trainer.accelerator=cpu", *overrides, f"trainer.max_steps={steps}", "trainer.enable_progress_bar=false",
        "val_depth=1", "depth=1", "logger=none", "report=none", f"cache_dir={cache}", f"hydra.run.dir={run}",
    ]  # fmt: skip


def compare(rounds: int, steps: int, cores: int, layers: int | None) -> None:
    """Train in each way in turn, each time in new processes; print pairs per second of wall time.

    The values are those of `result.json`: over all processes, without start-up and the first three steps.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("processes: expected Linux, which can restrict a process to some cores")
    available = sorted(os.sched_getaffinity(0))
    if len(available) < cores:
        raise SystemExit(f"--cores: expected at most {len(available)}, got {cores}")
    os.sched_setaffinity(0, available[:cores])
    rates: dict[str, list[float]] = {name: [] for name in ways_of(cores)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for index, (name, (threads, overrides)) in enumerate(ways_of(cores).items()):
                run = Path(folder) / f"{number}-{index}"
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
                arguments = command(run, Path(folder) / "cache", steps, layers, overrides)
                if not number:
                    print(f"OMP_NUM_THREADS={threads} {' '.join(arguments)}", flush=True)
                done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{name}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
                result = json.loads((run / "result.json").read_text())
                precision = json.loads((run / "environment.json").read_text()).get("precision")
                rates[name].append(result["pairs_per_second"])
                print(f"round {number}, {name}: {result['pairs_per_second']:.2f} pairs/s, {precision}", flush=True)
    first = median(next(iter(rates.values())))
    print(f"\n{cores} cores, load average {os.getloadavg()[0]:.1f}, medians of {rounds} rounds of {steps} steps")
    print("| way | pairs/s of wall time | ratio | rounds |\n| --- | --- | --- | --- |")
    for name, values in rates.items():
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"| {name} | {median(values):.2f} | {median(values) / first:.2f} | {shown} |")
