"""Time and memory of MaxSim: this package's kernel, its version in torch, and late-interaction-kernels if installed.

python benchmarks/maxsim.py [--device cuda] [--docs 1000] [--doc-tokens 300] [--step-queries 512] [--step-docs 1024]
There are two cases. In the first, one query of 32 vectors is scored with `--docs` docs, forward only. In the second, a
training step scores every query of `--step-queries` with every doc of `--step-docs`, forward and backward. Times are
   call     for the whole call by the GPU's clock, with an empty L2 cache (triton.testing.do_bench);
   kernel   for the kernels alone, replayed as a CUDA graph, without work of the host;
   host     for the launch of the call by the host, from many calls without a wait.
The version in torch compares blocks of 1,024 query vectors and 8,192 doc vectors with masks, as a training does without
the kernel. `torch, equal lengths` is one matrix product, a maximum and a sum, which requires texts of equal length. On
a CPU only the versions in torch run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from one_line import one_line

from ranker.interactions import maxsim as interactions
from ranker.interactions.maxsim import TextVectors, blocks, maxsim_all

QUERY_TOKENS, DIM = 32, 128


def texts(count: int, tokens: int, dtype: torch.dtype, device: str) -> TextVectors:
    values = torch.nn.functional.normalize(torch.randn(count * tokens, DIM, device=device), dim=1).to(dtype)
    return TextVectors(values, torch.full((count,), tokens, device=device))


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call; on a GPU by the GPU's clock, without the time to launch it."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=50, rep=20 * repeats, return_mode="median")
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def in_blocks(queries: TextVectors, docs: TextVectors) -> torch.Tensor:
    """Score every query with every doc by torch's version, in blocks."""
    device = queries.values.device
    doc_blocks = [docs.take(some) for some in blocks(torch.arange(docs.num_texts, device=device), docs, 8192)]
    rows = []
    for some in blocks(torch.arange(queries.num_texts, device=device), queries, 1024):
        own = queries.take(some)
        rows.append(torch.cat([maxsim_all(own, part) for part in doc_blocks], 1))
    return torch.cat(rows)


def step(score: Callable[[TextVectors, TextVectors], torch.Tensor], queries: TextVectors, docs: TextVectors) -> None:
    leaves = [text.values.detach().requires_grad_() for text in (queries, docs)]
    scores = score(TextVectors(leaves[0], queries.counts), TextVectors(leaves[1], docs.counts))
    scores.logsumexp(1).sum().backward()


def with_form(kernel: bool, call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs the call with the kernel, or with torch's version on any device."""
    original = interactions.has_kernel

    def run() -> object:
        interactions.has_kernel = original if kernel else (lambda queries, docs: False)
        try:
            return call()
        finally:
            interactions.has_kernel = original

    return run


def kernel_milliseconds(call: Callable[[], object]) -> str:
    """Return the time of a call's kernels, as a CUDA graph. The call must not wait for the GPU."""
    from triton.testing import do_bench_cudagraph

    return f"{do_bench_cudagraph(call, rep=50, return_mode='median'):.4f}"


def host_milliseconds(call: Callable[[], object], repeats: int = 200) -> str:
    """Return the time that the host needs to launch a call."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return f"{1000 * spent / repeats:.4f}"


def measured(name: str, call: Callable[[], object], device: str, repeats: int, parts: str = "") -> None:
    call()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    call()
    peak = f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}" if device == "cuda" else ""
    cells = [f"{milliseconds(call, device, repeats):.4f}"]
    if parts:
        cells.append(kernel_milliseconds(call) if "kernel" in parts and device == "cuda" else "")
        cells.append(host_milliseconds(call) if device == "cuda" else "")
    print(f"| {name} | {' | '.join(cells)} | {peak} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (
        ("docs", 1000),
        ("doc-tokens", 300),
        ("step-queries", 512),
        ("step-docs", 1024),
        ("step-doc-tokens", 180),
        ("repeats", 10),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    forms = (("this package's kernel", True), ("torch", False)) if args.device == "cuda" else (("torch", False),)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}")
    for dtype in (torch.bfloat16, torch.float32):
        one = texts(1, QUERY_TOKENS, dtype, args.device)
        docs = texts(args.docs, args.doc_tokens, dtype, args.device)
        print(f"\n1 query x {args.docs} docs x {QUERY_TOKENS} x {args.doc_tokens}, {dtype}")
        print("| forward | call, ms | kernel, ms | host, ms | MB added |\n| --- | --- | --- | --- | --- |")
        grids = [text.values.view(text.num_texts, -1, DIM) for text in (one, docs)]
        calls = {name: with_form(kernel, lambda: maxsim_all(one, docs)) for name, kernel in forms}  # noqa: B023
        calls["torch, equal lengths"] = lambda: (grids[1] @ grids[0][0].T).amax(1).float().sum(1)  # noqa: B023
        if args.device == "cuda" and find_spec("late_interaction_kernels") is not None:
            from late_interaction_kernels import maxsim as theirs

            calls["late-interaction-kernels"] = lambda: theirs(*grids)  # noqa: B023
        for name, call in calls.items():
            waits = name == "torch"  # it reads the largest numbers of vectors from the GPU, so it can't be captured
            measured(name, call, args.device, args.repeats, "host" if waits else "kernel, host")
    queries = texts(args.step_queries, QUERY_TOKENS, torch.float32, args.device)
    docs = texts(args.step_docs, args.step_doc_tokens, torch.float32, args.device)
    print(f"\n{args.step_queries} queries x {args.step_docs} docs of {args.step_doc_tokens}, float32")
    print("| forward and backward | ms | MB added |\n| --- | --- | --- |")
    for name, kernel in forms:
        score = maxsim_all if kernel else in_blocks
        measured(name, with_form(kernel, lambda: step(score, queries, docs)), args.device, args.repeats)  # noqa: B023
    if args.device == "cuda" and find_spec("late_interaction_kernels") is not None:
        from late_interaction_kernels import maxsim as theirs

        def other(queries: TextVectors, docs: TextVectors) -> torch.Tensor:
            return theirs(*(text.values.view(text.num_texts, -1, DIM) for text in (queries, docs)))

        measured("late-interaction-kernels", lambda: step(other, queries, docs), args.device, args.repeats)


if __name__ == "__main__":
    one_line(main)
