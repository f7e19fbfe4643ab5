"""Training over several GPUs: speed against one, and the same losses.

    python benchmarks/scaling.py --devices 1 2

Each number of devices is a run of its own. Speed: bf16, as many pairs a GPU and step on any number (weak scaling). Losses: float32, SGD,
no dropout, the same steps cut for each number of devices; they must agree to 1e-5. With `--bf16-losses` the first step's loss in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from train_throughput import DOCS, SIZES, collection, module_of  # noqa: E402

from ranker.data.collection import Splits  # noqa: E402
from ranker.data.datamodule import BatchOptions, RankData, TextLimits  # noqa: E402
from ranker.training.throughput import Throughput  # noqa: E402


class Losses(pl.Callback):
    """Each step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Keep it; reading it makes the device wait, which no timing sees."""
        self.values.append(float(trainer.callback_metrics["train/loss"]))


def run(args: argparse.Namespace) -> None:
    """One training; the first process writes what it found."""
    gpu = torch.cuda.is_available()
    world, what = args.run, args.what
    torch.backends.cuda.enable_cudnn_sdp(False)
    exact = what != "speed"
    module = module_of(args.size, optimizer=(lambda groups: torch.optim.SGD(groups, lr=0.01)) if exact else None)
    if exact:
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    pairs, steps = (128, 6) if exact else (args.pairs * world, args.steps)
    data = collection(pairs // DOCS * steps)
    loaders = RankData(
        Splits(data, None, {}), module.scorer.encoder.tokenizer, "pairs", 512,
        BatchOptions(queries=pairs // DOCS, docs=DOCS, max_tokens=args.max_tokens, workers=4 if gpu else 0), TextLimits(64, 256),
        cache_dir=args.cache,
    )  # fmt: skip
    losses, throughput = Losses(), Throughput()
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=world, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[losses if exact else throughput],
        precision="32-true" if what == "float32" or not gpu else "bf16-mixed",
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True) if world > 1 else "auto",
    )  # fmt: skip
    trainer.fit(module, datamodule=loaders)
    if trainer.is_global_zero:
        Path(args.out).write_text(json.dumps({"losses": losses.values, **throughput.report()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--pairs", type=int, default=744, help="pairs of a step on each device")
    parser.add_argument("--max-tokens", type=int, default=69632)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--what", default="speed", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.run:
        run(args)
        return
    with tempfile.TemporaryDirectory() as folder:

        def train(what: str, devices: int) -> dict[str, Any]:
            out = Path(folder) / "out.json"
            out.unlink(missing_ok=True)
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                f"--run={devices}",
                f"--what={what}",
                f"--out={out}",
                f"--cache={folder}/{what}",
            ]
            same = [f"--size={args.size}", f"--pairs={args.pairs}", f"--max-tokens={args.max_tokens}", f"--steps={args.steps}"]
            done = subprocess.run([*command, *same], capture_output=True, text=True)
            if not out.exists():
                sys.exit(f"{what} on {devices} failed:\n{done.stderr[-3000:]}")
            return json.loads(out.read_text())

        for what in ("float32", "bf16"):
            found = {devices: train(what, devices)["losses"] for devices in args.devices}
            first = found[args.devices[0]]
            for devices, losses in found.items():
                gap = max(abs(a - b) / abs(b) for a, b in zip(losses, first, strict=True))
                start = abs(losses[0] - first[0]) / abs(first[0])
                print(
                    f"{what} losses on {devices}: {losses[0]:.7f} ... {losses[-1]:.7f}; largest gap {gap:.1e}, first step {start:.1e}",
                    flush=True,
                )
        one = 0.0
        for _ in range(args.rounds):
            for devices in args.devices:
                found = train("speed", devices)
                one = found["pairs_per_second"] / devices if devices == args.devices[0] else one
                share = found["pairs_per_second"] / devices / one
                print(f"{devices} devices: {found['pairs_per_second']:.0f} pairs/s, {share:.3f} of linear, {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
