"""Time of a contrastive step of dpr, with and without two optimisations, measured in turn in one run.

    python benchmarks/contrastive_step.py                                    # one GPU, or a small model on a CPU
    torchrun --nproc-per-node 2 benchmarks/contrastive_step.py --devices 2   # two GPUs

There are three variants. The first is the step as it is. The second encodes each micro-batch twice and keeps no graph
from the first pass. The third encodes queries before docs, so shared weights get their gradients only at the end of the
backward pass. Texts and sizes are those of scaling.py. The first step of each round is not counted. On a CPU, seconds
are processor time, and the last lines give the share of weights whose gradient is ready during the backward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from one_line import one_line
from scaling_part import Part, data_of, rank, scorer_of, trainer_of
from train_throughput import DOCS, collection

from ranker.data.collection import Splits
from ranker.losses.lce import LCE
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.options import Optimization

ROUNDS = 3
GPU = torch.cuda.is_available()


class Twice(ContrastiveModule):
    """Encode each micro-batch twice."""

    def _encode_step(self, *args: Any) -> Any:
        with torch.no_grad():
            queries, docs, rows, _ = super()._encode_step(*args)
        return queries, docs, rows, None


class QueriesFirst(ContrastiveModule):
    """Encode queries before docs."""

    def _encode(self, batch: Any) -> Any:
        return self.scorer.encode_queries(batch.queries), self.scorer.encode_docs(batch.docs)


VARIANTS = {"as it is": ContrastiveModule, "encoded twice": Twice, "queries first": QueriesFirst}


class Clock(pl.Callback):
    """Measure the seconds of each step, and when each weight got its gradient in the backward pass of the last step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.ready: list[tuple[float, int]] = []
        self.started = 0.0

    def now(self) -> float:
        """Return the time, after the device has finished its work."""
        if GPU:
            torch.cuda.synchronize()
        return time.perf_counter() if GPU else time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Store the time at the end of a step."""
        self.ends.append(self.now())

    def on_before_backward(self, *_: Any) -> None:
        """Store the time at the start of a backward pass."""
        self.ready, self.started = [], time.perf_counter()

    def watch(self, module: torch.nn.Module) -> None:
        """Store when each weight of a module gets its gradient, by the host's clock, which is right only on a CPU."""
        for weight in module.parameters():
            weight.register_post_accumulate_grad_hook(
                lambda weight: self.ready.append((time.perf_counter() - self.started, weight.numel()))
            )


def measure(part: Part, kind: type[ContrastiveModule], watch: bool = False) -> Clock:
    """Train for a few steps."""
    scorer, clock = scorer_of(part, dropout=True), Clock()
    make: Any = lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=GPU)  # noqa: E731
    options = Optimization(make, lambda step, total: 1.0, total_steps=part.steps)
    module = kind(scorer, ["nDCG@10"], loss=LCE(), optimization=options)
    if watch:
        clock.watch(module)
    data = collection(part.groups, seed=1)
    pairs = part.pairs * part.devices
    trainer = trainer_of(part, "bf16" if GPU else "float32", clock, max_steps=part.steps)
    trainer.fit(module, datamodule=data_of(part, scorer, Splits(data, None, {}), pairs, part.max_tokens))
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "minilm", "base", "large"], default="base" if GPU else "minilm")
    parser.add_argument("--pairs", type=int, default=744 if GPU else 32, help="pairs per step and device")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[69632, 17408] if GPU else [8192, 2304])
    parser.add_argument("--steps", type=int, default=20 if GPU else 4, help="steps of a variant in a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        groups = (args.steps + 1) * args.pairs * args.devices // DOCS
        part = Part(
            "speed",
            args.devices,
            "dpr",
            args.size,
            args.pairs,
            0,
            args.steps,
            0,
            0,
            "auto",
            groups,
            0,
            folder,
            "",
            600,
            0,
        )
        for budget in args.max_tokens:
            seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _ in range(ROUNDS):
                for name, kind in VARIANTS.items():
                    ends = measure(replace(part, max_tokens=budget), kind).ends
                    seconds[name] += [end - start for start, end in pairwise(ends)]
            if rank() == 0:
                for name, values in seconds.items():
                    found = {"max_tokens": budget, "variant": name, "seconds_a_step": round(median(values), 4)}
                    print(json.dumps(found | {"pairs_per_second": round(args.pairs * args.devices / median(values))}))
        if GPU:
            return
        for name in ("as it is", "queries first"):
            clock = measure(replace(part, max_tokens=args.max_tokens[0]), VARIANTS[name], watch=True)
            total, last = sum(numel for _, numel in clock.ready), max(at for at, _ in clock.ready)
            shares = {
                f"before {percent} %": round(
                    sum(numel for at, numel in clock.ready if at < last * percent / 100) / total, 2
                )
                for percent in (50, 90)
            }
            print(json.dumps({"gradients ready": name, **shares}))


if __name__ == "__main__":
    one_line(main)
