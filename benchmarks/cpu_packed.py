"""Training rate on the CPU of a ModernBERT of MiniLM's size: packed rows beside transformers' padded loop.

    python benchmarks/cpu_packed.py [--rows 64] [--rounds 5] [--threads 2]

Weights are random. Lengths are log-normal around 90 tokens, cut at 512. Three loops take the same optimizer steps of
the same rows, one after another in each round, and the medians of their rates are compared: this package's encoder;
transformers' own forward over padded batches of 16 rows in random order; the same with rows sorted by length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import ModernBertConfig, ModernBertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

BATCH = 16  # rows of a padded batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of an optimizer step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=30522,
        hidden_size=384,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=12,
        pad_token_id=0,
    )
    model = ModernBertModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    lengths = torch.randn(options.rows, generator=torch.Generator().manual_seed(0)).mul(0.6).add(4.5).exp()
    lengths = lengths.int().clamp(8, 512).tolist()
    rows = [torch.randint(100, 30000, (length,)) for length in lengths]
    loops: dict[str, Callable[[], None]] = {
        "packed": packed(Encoder(model, tiny_tokenizer(), Execution()), rows),
        "padded, random order": padded(model, rows),
        "padded, sorted": padded(model, sorted(rows, key=len)),
    }
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for round_number in range(options.rounds + 1):
        for name, backward in loops.items():
            started = time.perf_counter()
            backward()
            optimizer.step()
            optimizer.zero_grad()
            if round_number:  # the first one warms up
                rates[name].append(options.rows / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} threads, float32")
    print(f"{options.rows} rows a step, mean {sum(lengths) / len(lengths):.0f} tokens, longest {max(lengths)}")
    for name, rate in medians.items():
        print(f"{name:22} {rate:7.2f} rows/s   {medians['packed'] / rate:.2f} times slower than packed")


def packed(encoder: Encoder, rows: list[torch.Tensor]) -> Callable[[], None]:
    """One pass over all rows by this package's encoder; a row's first state is its score."""
    encoder.train()
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    tokens = torch.cat(rows)
    batch = TokenBatch(tokens, torch.zeros_like(tokens), offsets, max(map(len, rows)))

    def backward() -> None:
        encoder.pooled(batch, "cls").float().square().mean().backward()

    return backward


def padded(model: ModernBertModel, rows: list[torch.Tensor]) -> Callable[[], None]:
    """The same step by transformers' own forward, over padded batches."""
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]

    def backward() -> None:
        model.set_attn_implementation("sdpa")
        for batch in batches:
            tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
            states = model(input_ids=tokens, attention_mask=mask).last_hidden_state[:, 0]
            (states.square().mean() * len(batch) / len(rows)).backward()

    return backward


if __name__ == "__main__":
    main()
