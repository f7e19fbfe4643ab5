"""CPU time of a training pass of a ModernBERT of MiniLM's size: this package's layers, and transformers' padded pass.

    OMP_NUM_THREADS=1 python benchmarks/cpu_layouts.py

Each pass is a forward and backward pass over 48 pairs with lengths like MS MARCO's, in float32. transformers' forward
pass runs on padded batches of 16 pairs, in random order or sorted by length. The variants run in turn; the script
prints the lowest CPU time of each over the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from train_throughput import encoder_of, lognormal  # noqa: E402

from ranker.encoders.execution import DEFAULT  # noqa: E402
from ranker.types import TokenBatch  # noqa: E402

PAIRS, BATCH = 48, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    encoder = encoder_of("modernbert-minilm", DEFAULT).train()
    rng = np.random.default_rng(0)
    lengths = lognormal(rng, 8, 4, PAIRS, 64) + lognormal(rng, 76, 35, PAIRS, 256) + 3
    texts = [torch.randint(5, 30000, (int(length),)) for length in lengths]

    def own() -> None:
        tokens, ends = torch.cat(texts), torch.tensor([0, *lengths]).cumsum(0).int()
        batch = TokenBatch(tokens, torch.zeros_like(tokens), ends, int(lengths.max()))
        encoder.pooled(batch, "cls").square().sum().backward()

    def padded(order: Iterable[int]) -> None:
        for rows in torch.tensor(list(order)).split(BATCH):
            group = [texts[row] for row in rows.tolist()]
            width = max(map(len, group))
            ids = torch.stack([pad(row, (0, width - len(row))) for row in group])
            mask = torch.stack([torch.arange(width) < len(row) for row in group]).long()
            encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].square().sum().backward()

    ways = {
        "this package": own,
        "padded, random order": lambda: padded(range(PAIRS)),
        "padded, sorted by length": lambda: padded(np.argsort(lengths).tolist()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.process_time()
            way()
            seconds[name].append(time.process_time() - started)
            encoder.zero_grad()
    for name, values in seconds.items():
        print(f"| {name} | {PAIRS / min(values):.1f} pairs per second of CPU time |")


if __name__ == "__main__":
    one_line(main)
