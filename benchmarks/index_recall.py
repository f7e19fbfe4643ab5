"""Recall@10 of each index type against the flat index, and queries per second, on clustered generated vectors.

python benchmarks/index_recall.py [--vectors 100000] [--dim 128] [--clusters 1000] [--queries 1000] [--threads 1]
Vectors are cluster centres plus noise of about the same norm, normalised to length 1. Queries are drawn in the same
way. Recall@10 is the mean share of the flat index's ten best docs that the index also returns among its ten best docs.
As in search.py, an index's candidates are rescored exactly.
"""

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from one_line import one_line

from ranker.retrieval.index import VectorIndex
from ranker.retrieval.indexes.binary import Binary
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.hnsw import HNSW
from ranker.retrieval.indexes.int8 import Int8
from ranker.retrieval.indexes.ivf_flat import IVFFlat
from ranker.retrieval.indexes.ivf_pq import IVFPQ

DEPTH = 10


class Generated:
    """Vectors in memory, with the interface of a folder of stored vectors."""

    def __init__(self, values: np.ndarray, folder: Path) -> None:
        self.values, self.folder, self.num_vectors = values, folder, len(values)
        self.description = SimpleNamespace(dim=values.shape[1], digest="generated")
        self.ends, self.doc_ids = np.arange(1, len(values) + 1), np.arange(len(values)).astype(np.bytes_)

    def chunks(self, size: int = 65536):
        return (self.values[start : start + size] for start in range(0, len(self.values), size))

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        return self.values[np.sort(np.random.default_rng(seed).permutation(len(self.values))[:count])]


def clustered(count: int, centres: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    values = centres[rng.integers(len(centres), size=count)] + rng.normal(size=(count, centres.shape[1])).astype(
        np.float32
    )
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def best(index: VectorIndex, points: Generated, queries: np.ndarray) -> np.ndarray:
    """Return the indices of the ten best vectors after the index's candidates are rescored exactly [queries, DEPTH]."""
    _, rows = index.search(queries, DEPTH * index.index_type.rescore)
    scores = np.einsum("qd,qpd->qp", queries, points.values[rows])
    return np.take_along_axis(rows, np.argsort(-np.where(rows >= 0, scores, -np.inf), axis=1)[:, :DEPTH], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("vectors", 100_000),
        ("dim", 128),
        ("clusters", 1000),
        ("queries", 1000),
        ("threads", 1),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    import faiss

    faiss.omp_set_num_threads(args.threads)
    rng = np.random.default_rng(args.seed)
    centres = rng.normal(size=(args.clusters, args.dim)).astype(np.float32)
    print(
        f"{args.vectors} vectors of {args.dim}, {args.clusters} clusters, {args.queries} queries, "
        f"{args.threads} thread(s), faiss {faiss.__version__}"
    )
    print("| index | recall@10 | queries/s | built in s | MB |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        points = Generated(clustered(args.vectors, centres, rng), Path(folder))
        queries = clustered(args.queries, centres, rng)
        exact = None
        for kind in (Flat(), Int8(), Binary(), IVFFlat(), IVFPQ(), HNSW()):
            started = time.perf_counter()
            index = VectorIndex.over(points, kind)  # type: ignore[arg-type]
            built = time.perf_counter() - started
            best(index, points, queries[:50])
            started = time.perf_counter()
            rows = best(index, points, queries)
            spent = time.perf_counter() - started
            exact = rows if exact is None else exact
            recall = np.mean(
                [len(set(row) & set(truth)) / DEPTH for row, truth in zip(rows.tolist(), exact.tolist(), strict=True)]
            )
            name = type(kind).__name__
            print(
                f"| {name} | {recall:.4f} | {len(queries) / spent:.0f} | {built:.1f} | {index.num_bytes / 1e6:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    one_line(main)
