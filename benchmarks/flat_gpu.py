"""Speed of index=flat on GPUs: queries/s of exact search in batches. The ranking is compared with that of a CPU.

python benchmarks/flat_gpu.py [--vectors 8800000] [--dim 768] [--depth 100] [--batch 1024]
Unit vectors are generated on the device. `search` is the selection of candidates by products in bfloat16. `all` is the
whole search of the engine: selection, products in double precision, and ordering by score and doc id. First, the
ranking of `--check` vectors is compared with that of float64 products on the CPU. The device holds the vectors in
bfloat16 and in float32: 41 GB by default. For a try on a CPU: --vectors 20000 --check 5000 --batch 32.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.retrieval.indexes.flat import Flat  # noqa: E402
from ranker.retrieval.tensor_index import TensorIndex  # noqa: E402
from ranker.retrieval.vector_engine import VectorEngine  # noqa: E402

BLOCK = 2**16  # number of vectors generated at a time


class Generated:
    """Generated vectors with the part of `VectorStore`'s interface that `TensorIndex` reads."""

    def __init__(self, count: int, dim: int, device: str) -> None:
        self.num_vectors, self.description, self._device = count, SimpleNamespace(dim=dim, several=False), device
        self.num_bytes = 4 * count * dim
        self.doc_ids = np.char.add(b"d", np.char.zfill(np.arange(count).astype("S8"), 8))

    def block(self, number: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(seed * 10**6 + number)
        shape = min(BLOCK, self.num_vectors - number * BLOCK), self.description.dim
        values = torch.randn(shape, generator=generator, device=self._device)
        return torch.nn.functional.normalize(values, dim=1)

    def between(self, first: int, end: int, max_vectors: int = BLOCK) -> Iterator[np.ndarray]:
        for number in range(first // BLOCK, -(-end // BLOCK)):
            values = self.block(number).cpu().numpy()
            yield values[max(0, first - number * BLOCK) : end - number * BLOCK]


class Scorer:
    """The part of a bi-encoder that a search with given query vectors needs."""

    def divisor(self) -> torch.Tensor:
        return torch.tensor(1.0)


def engine_of(store: Generated, devices: list[str]) -> VectorEngine:
    return VectorEngine(Scorer(), None, store, TensorIndex(store, Flat(), devices), None)  # type: ignore[arg-type]


def check(args: argparse.Namespace, devices: list[str]) -> None:
    """Compare rankings with those of float64 products on the CPU."""
    store = Generated(args.check, args.dim, devices[0])
    queries = Generated(32, args.dim, devices[0]).block(0, seed=1).cpu().numpy()
    values = np.concatenate(list(store.between(0, args.check))).astype(np.float64)
    found = engine_of(store, devices)._search_single(queries, args.depth)
    for query, (rows, _) in zip(queries, found, strict=True):
        scores = (values @ query.astype(np.float64)).astype(np.float32)
        truth = np.lexsort((store.doc_ids, scores))[::-1][: args.depth]
        if rows.tolist() != truth.tolist():
            raise SystemExit(f"{args.check} vectors: expected the ranking of the CPU, got another one")
    print(f"{args.check} vectors, {len(queries)} queries: the {args.depth} best and their order equal the CPU's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("vectors", 8_800_000),
        ("dim", 768),
        ("depth", 100),
        ("batch", 1024),
        ("batches", 5),
        ("check", 100_000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    print(f"torch {torch.__version__}, {f'{gpus} x {torch.cuda.get_device_name()}' if gpus else 'CPU'}")
    check(args, devices)
    started = time.perf_counter()
    engine = engine_of(Generated(args.vectors, args.dim, devices[0]), devices)
    print(
        f"{args.vectors} vectors of {args.dim}: generated and loaded in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    if gpus:
        print(f"memory of the first GPU: {torch.cuda.memory_allocated(0) / 1e9:.1f} GB")
    batches = [
        Generated(args.batch, args.dim, devices[0]).block(0, seed=2 + number).cpu().numpy()
        for number in range(args.batches + 1)
    ]
    count = args.depth * engine.index.rescore + 32
    for name, call in (
        ("search", lambda batch: engine.index.search(batch, count)),
        ("all", lambda batch: engine._search_single(batch, args.depth)),
    ):
        call(batches[0])
        started = time.perf_counter()
        for batch in batches[1:]:
            call(batch)
        seconds = (time.perf_counter() - started) / args.batches
        print(
            f"{name}: {1000 * seconds:.1f} ms per {args.batch} queries, {args.batch / seconds:.0f} queries/s",
            flush=True,
        )
    if gpus:
        print(f"at most {torch.cuda.max_memory_allocated(0) / 1e9:.1f} GB on the first GPU")


if __name__ == "__main__":
    one_line(main)
