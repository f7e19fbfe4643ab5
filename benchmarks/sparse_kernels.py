"""Time SPLADE's projection to the vocabulary with pooling on CUDA: the Triton kernel, and blocks of torch's operations.

    python benchmarks/sparse_kernels.py --dim 768 --vocabulary 30522 50368

The inputs are rows of `--tokens` tokens in bf16. The backward pass gets a gradient for about 200 words of each row, as
in a trained model. Results are medians of 20 calls.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.interactions import term_pooling  # noqa: E402
from ranker.types import TokenBatch  # noqa: E402

TERMS = 200
HAS_KERNEL = term_pooling.has_kernel


def table(args: argparse.Namespace, dim: int, vocabulary: int) -> None:
    """Print milliseconds and memory of projection and pooling alone, forward and with backward, on CUDA."""
    lengths = [args.tokens] * (args.budget // args.tokens)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64, device="cuda")
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    batch = TokenBatch(tokens, tokens, offsets, args.tokens)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, matrix = (
        torch.randn(rows, dim, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
        for rows in (sum(lengths), vocabulary)
    )
    bias = torch.zeros(vocabulary, device="cuda").requires_grad_()
    print(f"\n{len(lengths)} rows of {args.tokens} tokens, dim {dim}, {vocabulary} words")
    print("| form | pooling | forward ms | with backward ms | memory added |\n| --- | --- | --- | --- | --- |")
    for pooling in ("max", "sum"):
        with torch.no_grad():
            weights = term_pooling.term_weights(inputs, matrix, bias, batch, pooling, "relu")
            kept = weights.flatten().kthvalue(int(weights.numel() * (1 - TERMS / vocabulary))).values
        for form in ("kernel", "blocks"):
            term_pooling.has_kernel = HAS_KERNEL if form == "kernel" else lambda inputs, dtype: False

            def forward(pooling: str = pooling) -> torch.Tensor:
                return term_pooling.term_weights(inputs, matrix, bias, batch, pooling, "relu")

            def backward(pooling: str = pooling, kept: torch.Tensor = kept) -> None:
                out = forward(pooling)
                out.backward((out > kept).to(out))

            with torch.no_grad():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                ahead = milliseconds(forward)
                added = (torch.cuda.max_memory_allocated() - before) / 2**20
            both = milliseconds(backward)
            print(f"| {form} | {pooling} | {ahead:.2f} | {both:.2f} | {added:.0f} MiB |", flush=True)


def milliseconds(call, rounds: int = 20) -> float:
    """Return the median time of a call on CUDA."""
    found = []
    for number in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(start.elapsed_time(end))
    return sorted(found)[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, nargs="+", default=[768])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[30522, 50368])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row")
    parser.add_argument("--budget", type=int, default=32_768, help="tokens of the batch")
    args = parser.parse_args()
    for dim in args.dim:
        for vocabulary in args.vocabulary:
            table(args, dim, vocabulary)


if __name__ == "__main__":
    one_line(main)
