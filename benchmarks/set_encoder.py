"""Cost of a Set-Encoder compared with monoBERT: time and memory of a training step and of ranking, by list length.

    python benchmarks/set_encoder.py --device cuda
    python benchmarks/set_encoder.py --device cpu --layers 2 --dim 64 --heads 1 --pairs 64 --lists 4 8 --rounds 3

The model has random weights in the shape of BERT-base. Each micro-batch has about `--pairs` pairs of `--length` tokens,
in whole lists. Both models run in turn in every round, so that other work on the machine affects both alike. The script
prints a table with medians, and with the ratio of the two times in a round (median, lowest, highest). `--out` also
writes the results as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import seconds_and_memory
from one_line import one_line

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.lists.set_encoder import SetEncoder
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

VOCABULARY = 30522


def batch_of(options: argparse.Namespace, docs: int) -> RankBatch:
    """Return whole lists of `docs` docs, at least one list, with about `options.pairs` pairs together."""
    lists = max(1, options.pairs // docs)
    rows, rng = lists * docs, torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (rows * options.length,), generator=rng)
    ends = torch.arange(0, rows * options.length + 1, options.length, dtype=torch.int32)
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), ends, options.length)
    mask = torch.ones(lists, docs, dtype=torch.bool)
    return RankBatch(torch.zeros(lists, docs), mask, torch.arange(lists), 1.0, pairs)


def scorer_of(kind: Any, options: argparse.Namespace) -> Any:
    """Return a scorer with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=options.dim, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=4 * options.dim, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    # without CUDA graphs, which would save kernel launches only in small passes of monoBERT
    execution = Execution(graphs=False)
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer(), execution)
    return kind(encoder, head="own", pooling="cls").to(options.device)


def seconds_of(scorer: Any, batch: RankBatch, train: bool, device: str) -> tuple[float, float]:
    """Return the seconds of one pass, and the peak memory in GB on a GPU."""

    def step() -> None:
        with torch.set_grad_enabled(train), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scores = scorer(batch)
            if train:
                scores.square().mean().backward()
        scorer.zero_grad()

    scorer.train(train)
    scorer.encoder.dropout_seed = 1
    return seconds_and_memory(step, device)


def main() -> None:
    """Measure both models in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--lists", type=int, nargs="+", default=[8, 32, 100], help="docs of a list")
    parser.add_argument("--pairs", type=int, default=384, help="pairs of a micro-batch")
    parser.add_argument("--length", type=int, default=87, help="tokens of a pair")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    scorers = {"monobert": scorer_of(MonoBERT, options), "set_encoder": scorer_of(SetEncoder, options)}
    found = []
    print("| docs | pass | monobert, pairs/s | set_encoder, pairs/s | cost (lowest to highest round) | memory, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for docs in options.lists:
        batch = batch_of(options, docs).to(options.device)
        pairs = batch.doc_mask.numel()
        for train in (True, False):
            times: dict[str, list[float]] = {name: [] for name in scorers}
            memory = dict.fromkeys(scorers, 0.0)
            for round_number in range(options.rounds + 3):
                for name, scorer in scorers.items():
                    seconds, used = seconds_of(scorer, batch, train, options.device)
                    if round_number >= 3:  # the first rounds compile kernels
                        times[name].append(seconds)
                        memory[name] = max(memory[name], used)
            ratios = [mine / base for base, mine in zip(times["monobert"], times["set_encoder"], strict=True)]
            entry = {
                "docs": docs,
                "pass": "training" if train else "ranking",
                "pairs": pairs,
                "pairs_per_second": {name: pairs / statistics.median(part) for name, part in times.items()},
                "cost": statistics.median(ratios) - 1,
                "cost_range": [min(ratios) - 1, max(ratios) - 1],
                "gigabytes": memory,
            }
            found.append(entry)
            rates, low_high = entry["pairs_per_second"], entry["cost_range"]
            print(
                f"| {docs} | {entry['pass']} | {rates['monobert']:.0f} | {rates['set_encoder']:.0f} | "
                f"{entry['cost']:+.1%} ({low_high[0]:+.1%} to {low_high[1]:+.1%}) | "
                f"{memory['monobert']:.2f} and {memory['set_encoder']:.2f} |",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps({"options": vars(options), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    one_line(main)
