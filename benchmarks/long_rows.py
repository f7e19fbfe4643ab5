"""Long documents: tokens per second of windows, compared with short rows, and of whole rows of 8,192 tokens.

    python benchmarks/long_rows.py --device cuda
    python benchmarks/long_rows.py --device cpu --layers 2 --dim 64 --heads 1 --budget 2048 --native 512 --rounds 3

Windows: monoBERT in the shape of BERT-base trains on docs of 512, 2,048 and 8,192 tokens in windows of 225 tokens with
a stride of 200 (`passages=maxp`), and on separate docs whose rows have the same lengths as these windows. Both run in
turn in every round.
Whole rows: a model in the shape of ModernBERT-base trains on rows of `--native` tokens, with checkpointing on and off.
mfu is the FLOP rate of matrix products, divided by that of a large bf16 product on the same GPU. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import seconds_and_memory
from one_line import one_line

from ranker.data.windows import Windows
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.models.monobert import MonoBERT
from ranker.passages.maxp import MaxP
from ranker.passages.windowed import Windowed
from ranker.training.flops import matmul_flops, near_pairs
from ranker.training.throughput import measure_matmul
from ranker.types import RankBatch, TokenBatch

VOCABULARY, QUERY, SPECIAL = 30522, 16, 3
WINDOWS = Windows(225, 200)


def rows_of(lengths: list[int]) -> TokenBatch:
    """Return rows of random tokens."""
    tokens = torch.randint(5, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return TokenBatch(tokens, torch.zeros_like(tokens), ends, max(lengths))


def group_of(rows: TokenBatch, docs: int) -> RankBatch:
    """Return a batch with one query and these docs."""
    mask = torch.ones(1, docs, dtype=torch.bool)
    return RankBatch(torch.zeros(1, docs), mask, torch.zeros(1).long(), 1.0, rows)


def seconds_of(scorer: Any, batch: RankBatch, device: str) -> tuple[float, float]:
    """Return the seconds of a forward and backward pass, and the peak memory in GB on a GPU."""

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scorer(batch).square().mean().backward()
        scorer.zero_grad()

    scorer.encoder.dropout_seed = 1
    return seconds_and_memory(step, device)


def windows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure windows, and short rows of the same lengths."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=options.dim, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=4 * options.dim, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer(), Execution(graphs=False))
    short = MonoBERT(encoder, head="own", pooling="cls").to(options.device)
    scorers = {"short rows": short, "windows": Windowed.of(short, WINDOWS, MaxP())}
    found = []
    for length in (512, 2048, 8192):
        counts, _ = WINDOWS.sizes(np.array([length]))
        number = int(counts[0])
        of_doc = [min(WINDOWS.length, length - 200 * j) + QUERY + SPECIAL for j in range(number)]
        docs = max(1, options.budget // sum(of_doc))
        rows = rows_of(of_doc * docs)
        batches = {
            "short rows": group_of(rows, docs * number),
            "windows": group_of(replace(rows, windows=torch.full((docs,), number), max_windows=number), docs),
        }
        times: dict[str, list[float]] = {name: [] for name in scorers}
        for round_number in range(options.rounds + 3):
            for name, scorer in scorers.items():
                seconds, _ = seconds_of(scorer, batches[name].to(options.device), options.device)
                if round_number >= 3:
                    times[name].append(seconds)
        ratios = [base / mine for base, mine in zip(times["short rows"], times["windows"], strict=True)]
        entry = {
            "doc_tokens": length,
            "windows": number,
            "docs": docs,
            "tokens_per_second": {name: rows.num_tokens / statistics.median(part) for name, part in times.items()},
            "share_of_short_rows": statistics.median(ratios),
            "share_range": [min(ratios), max(ratios)],
        }
        found.append(entry)
        rates = entry["tokens_per_second"]
        print(
            f"| {length} | {number} | {rates['short rows']:.0f} | {rates['windows']:.0f} | "
            f"{entry['share_of_short_rows']:.1%} ({min(ratios):.1%} to {max(ratios):.1%}) |",
            flush=True,
        )
    return found


def native(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure rows of `options.native` tokens, with checkpointing on and off in turn."""
    gpu, found = options.device == "cuda", []
    yardstick = measure_matmul(torch.device("cuda")) if gpu else 0.0
    config = ModernBertConfig(
        hidden_size=options.dim, num_hidden_layers=22 if options.layers == 12 else options.layers,
        num_attention_heads=options.heads, intermediate_size=3 * options.dim // 2,
        max_position_embeddings=options.native,
    )  # fmt: skip
    scorers: dict[bool, Any] = {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        execution = Execution(graphs=False, checkpointing=checkpointing)
        encoder = Encoder(ModernBertModel(config), tiny_tokenizer(), execution)
        scorers[checkpointing] = MonoBERT(encoder, head="own", pooling="cls").to(options.device)
    for rows in options.rows:
        batch = group_of(rows_of([options.native] * rows), rows).to(options.device)
        times: dict[bool, list[float]] = {key: [] for key in scorers}
        memory = dict.fromkeys(scorers, 0.0)
        for round_number in range(options.rounds + 3):
            for key, scorer in scorers.items():
                seconds, used = seconds_of(scorer, batch, options.device)
                if round_number >= 3:
                    times[key].append(seconds)
                    memory[key] = max(memory[key], used)
        lengths = torch.full((rows,), options.native)
        squares, near = float(lengths.double().square().sum()), float(near_pairs(lengths, config.sliding_window))
        flops = 3 * matmul_flops(config, rows * options.native, squares, rows, near)
        for key, part in times.items():
            median = statistics.median(part)
            entry = {
                "rows": rows, "tokens": options.native, "checkpointing": key,
                "tokens_per_second": rows * options.native / median, "gigabytes": memory[key],
                "mfu": flops / median / yardstick if yardstick else None,
            }  # fmt: skip
            found.append(entry)
            mfu = "" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
            print(
                f"| {rows} | {'on' if key else 'off'} | {entry['tokens_per_second']:.0f} | {mfu} | {memory[key]:.2f} |",
                flush=True,
            )
    return found


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch of windows")
    parser.add_argument("--native", type=int, default=8192, help="tokens of a native row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="native rows of a micro-batch")
    parser.add_argument("--layers", type=int, default=12, help="of BERT; ModernBERT then has 22")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    parts: dict[str, tuple[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
        "windows": ("| doc tokens | windows | short rows, tokens/s | windows, tokens/s | share |", windows),
        "native": ("| rows | checkpointing | tokens/s | mfu | memory, GB |", native),
    }
    found = {}
    for name, (title, measure) in parts.items():
        print(f"{title}\n|{' --- |' * (title.count('|') - 1)}")
        found[name] = measure(options)
        print()
    if options.out:
        Path(options.out).write_text(json.dumps({"options": vars(options), **found}, indent=1) + "\n")


if __name__ == "__main__":
    one_line(main)
