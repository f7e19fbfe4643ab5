"""Speed of training and inference with and without `encoder.share_prefix`, for a language model with LoRA.

    python benchmarks/shared_prefix.py --layers 4 --prefix 60 --doc 120 --docs 8
    python benchmarks/shared_prefix.py --size qwen3-0.6b --groups 32

The model has random weights in the shape of SmolLM2-135M or of a Qwen3 (`--size`), frozen and on a GPU in bfloat16,
with LoRA of rank 16 on all linear layers. `--layers` reduces the number of layers. Each group has `--docs` rows of
`--prefix` common tokens and `--doc` other tokens. The script prints one JSON line: pairs per second with and without
sharing (medians of rounds in which both run in turn), the ratios, and the largest difference between the states of last
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from one_line import one_line

from benchmarks.lm_throughput import RANK, SIZES, config_of
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.lora import LoRA, add_adapter
from ranker.encoders.lora_base import cast_base
from ranker.encoders.tiny import tiny_lm_tokenizer
from ranker.types import TokenBatch

SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "pad_token_id": 0,
}  # fmt: skip


def batch_of(options: argparse.Namespace, vocabulary: int, device: torch.device) -> TokenBatch:
    """Return the rows of `groups` groups."""
    rng, rows = torch.Generator().manual_seed(0), []
    for _ in range(options.groups):
        prefix = torch.randint(5, vocabulary, (options.prefix,), generator=rng)
        rows += [
            torch.cat([prefix, torch.randint(5, vocabulary, (options.doc,), generator=rng)])
            for _ in range(options.docs)
        ]
    length = options.prefix + options.doc
    tokens, offsets = torch.cat(rows), torch.arange(0, length * len(rows) + 1, length, dtype=torch.int32)
    return TokenBatch(tokens, torch.zeros_like(tokens), offsets, length).to(device)


def rates(encoder: Encoder, batch: TokenBatch, sizes: list[int], train: bool, rounds: int) -> list[list[float]]:
    """Return the pairs/s of whole rows and of shared prefixes, which run in turn, in each of `rounds` rounds.

    A time is that of three passes, one after another. The first round, which compiles kernels, does not count.
    """
    found: list[list[float]] = [[], []]
    encoder.train(train)
    for number in range(rounds + 1):
        for way, way_rates in enumerate(found):
            begin = time.perf_counter()
            for _ in range(3):
                with torch.set_grad_enabled(train), torch.autocast(batch.tokens.device.type, torch.bfloat16, on_gpu()):
                    states = encoder.last_of_groups(batch, sizes) if way else encoder.pooled(batch, "last")
                    if train:
                        states.float().square().sum().backward()
                        encoder.zero_grad()
            if on_gpu():
                torch.cuda.synchronize()
            if number:
                way_rates.append(3 * batch.num_rows / (time.perf_counter() - begin))
    return found


def on_gpu() -> bool:
    """Return whether the benchmark runs on a GPU."""
    return torch.cuda.is_available()


def main() -> None:
    """Measure both forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["smollm2-135m", *SIZES], default="smollm2-135m")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--layers", type=int, help="layers to keep")
    parser.add_argument("--prefix", type=int, default=60)
    parser.add_argument("--doc", type=int, default=120)
    parser.add_argument("--docs", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config: Any = LlamaConfig(**SMOLLM2) if options.size == "smollm2-135m" else config_of(options.size)
    config.num_hidden_layers, config.use_cache = options.layers or config.num_hidden_layers, False
    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu() else "cpu")
    model = AutoModel.from_config(config)
    add_adapter(model, LoRA(rank=RANK))
    encoder = Encoder(model, tiny_lm_tokenizer(), Execution(compile=False if options.eager else "auto")).to(device)
    if on_gpu():
        cast_base(model, torch.bfloat16)
    batch = batch_of(options, config.vocab_size, device)
    sizes = [options.docs] * options.groups
    found: dict[str, Any] = {"device": str(device), **vars(options)}
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=on_gpu()):
        whole, shared = encoder.eval().pooled(batch, "last"), encoder.last_of_groups(batch, sizes)
        found["largest difference"] = float((whole - shared).abs().max() / whole.abs().max())
    for name, train in (("training", True), ("inference", False)):
        apart, together = rates(encoder, batch, sizes, train, options.rounds)
        ratios = [shared / whole for whole, shared in zip(apart, together, strict=True)]
        found[f"{name}, whole rows, pairs/s"] = round(statistics.median(apart), 2)
        found[f"{name}, shared prefix, pairs/s"] = round(statistics.median(together), 2)
        found[f"{name}, ratio"] = round(statistics.median(ratios), 3)
        found[f"{name}, ratio of each round"] = [round(ratio, 3) for ratio in ratios]
    print(json.dumps(found))


if __name__ == "__main__":
    one_line(main)
