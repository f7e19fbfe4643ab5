"""Measure index=plaid on generated docs: time and memory of the build, sizes, queries/s on CPU and GPU, recall.

python benchmarks/late_generated.py [--docs 1000000] [--tokens 60] [--folder FOLDER]
Vectors are generated, so no model is needed. Docs have topics, with 500 docs per topic. 70 % of a doc's vectors lie
around the centres of its topic, the others around any centres. A query is 32 vectors of a doc, with noise. The index is
built on the GPU if there is one. Recall compares with exact MaxSim over all docs. It is measured if a GPU has room for
all vectors, or on a CPU if there are few docs. The last lines scale all results in proportion to 8.8 million docs, as
if a search read all docs. The folder takes docs x tokens x dim x 2 bytes: 15 GB by default.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from measuring import Milliseconds  # noqa: E402
from one_line import one_line  # noqa: E402

from ranker.files.folders import write_folder  # noqa: E402
from ranker.interactions.maxsim import TextVectors  # noqa: E402
from ranker.retrieval.indexes.plaid import Plaid  # noqa: E402
from ranker.retrieval.late import index as late_index  # noqa: E402
from ranker.retrieval.late.exact import exact_scores, query_vectors  # noqa: E402
from ranker.retrieval.vector_folder import Description, claim, shard_folder  # noqa: E402
from ranker.retrieval.vector_store import ShardWriter, VectorStore  # noqa: E402

SHARD_DOCS, TOPIC_DOCS, TOPIC_CENTRES, OF_TOPIC, NOISE = 10_000, 500, 120, 0.7, 0.6
QUERY_TOKENS, DEPTH, LARGE = 32, 100, 8_841_823
EXACT_ON_CPU = 20_000  # largest number of docs for which a CPU computes exact MaxSim


def write_shard(folder: Path, description: Description, number: int, centres: np.ndarray) -> np.ndarray:
    """Write the vectors of a shard; return those of its first docs, [20, tokens, dim]."""
    rng = np.random.default_rng([1, number])
    rows = np.arange(number * SHARD_DOCS, min((number + 1) * SHARD_DOCS, description.num_docs))
    tokens = description.max_doc_tokens
    topics = np.arange(-(-description.num_docs // TOPIC_DOCS))
    of_topics = np.random.default_rng(2).integers(len(centres), size=(len(topics), TOPIC_CENTRES))
    own = of_topics[rng.integers(len(topics), size=len(rows))]
    chosen = np.take_along_axis(own, rng.integers(TOPIC_CENTRES, size=(len(rows), tokens)), 1)
    anywhere = rng.integers(len(centres), size=chosen.shape)
    chosen = np.where(rng.random(chosen.shape) < OF_TOPIC, chosen, anywhere).flatten()
    counts = np.full(len(rows), tokens, dtype=np.int32)
    first_docs = np.zeros(0)
    with write_folder(shard_folder(folder, number)) as part:
        writer = ShardWriter(part, description, int(rows[0]), np.array([f"d{row:09}".encode() for row in rows]), counts)
        for start in range(0, len(chosen), 60_000):
            values = centres[chosen[start : start + 60_000]]
            values += NOISE * rng.standard_normal(values.shape, dtype=np.float32)
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            writer.vectors[start : start + len(values)] = values
            if not start:
                first_docs = values[: 20 * tokens].reshape(-1, tokens, description.dim).copy()
        writer.finish()
    return first_docs


def generate(folder: Path, args: argparse.Namespace) -> tuple[VectorStore, TextVectors]:
    rng, (docs, tokens, dim) = np.random.default_rng(0), (args.docs, args.tokens, args.dim)
    centres = rng.standard_normal((max(1000, min(200_000, docs * tokens // 100)), dim), dtype=np.float32)
    description = Description(
        "generated", str(docs), docs, "cosine", dim, True, "float16", "32-true", tokens, SHARD_DOCS
    )
    claim(folder, description)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        firsts = list(pool.map(lambda n: write_shard(folder, description, n, centres), range(description.num_shards)))
    every = np.concatenate(firsts)
    picked = every[rng.permutation(len(every))[: args.queries]]
    places = np.arange(QUERY_TOKENS) % tokens
    noisy = torch.from_numpy(picked[:, places] + 0.05 * rng.standard_normal((len(picked), QUERY_TOKENS, dim)))
    values = torch.nn.functional.normalize(noisy.float(), dim=2).flatten(0, 1)
    return VectorStore(folder), TextVectors(values, torch.full((len(picked),), QUERY_TOKENS), QUERY_TOKENS)


def some_of(queries: TextVectors, count: int) -> TextVectors:
    return queries.take(torch.arange(min(count, queries.num_texts)))


def best(ranked: list[Any]) -> list[set[int]]:
    return [set(rows[np.argsort(-scores, kind="stable")[:DEPTH]].tolist()) for rows, scores in ranked]


def search(name: str, index: Any, queries: TextVectors, batch: int, truth: list[set[int]] | None) -> float:
    """Print the speed and recall of single queries and of batches; return the queries per second of batches."""
    for size in (1, batch):
        index.rank(some_of(queries, size), DEPTH)  # this call compiles kernels
    times, found = Milliseconds(), []
    for number in range(queries.num_texts):
        found += times.of(index.rank, queries.take(torch.tensor([number])), DEPTH)
    started, spent = time.perf_counter(), time.process_time()
    for some in torch.arange(queries.num_texts).split(batch):
        index.rank(queries.take(some), DEPTH)
    wall, cpu = time.perf_counter() - started, time.process_time() - spent
    figures = {
        "p50 ms": statistics.median(times.walls),
        "p95 ms": float(np.percentile(times.walls, 95)),
        "p50 CPU ms": statistics.median(times.cpus),
        "queries/s": queries.num_texts / wall,
        "queries/CPU s": queries.num_texts / cpu,
    }
    if truth is not None:
        shares = [len(a & b) / len(b) for a, b in zip(best(found), truth, strict=False)]
        figures["recall@100"] = float(np.mean(shares))
    print(name, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    return figures["queries/s"]


def exact(index: Any, store: VectorStore, queries: TextVectors) -> list[set[int]] | None:
    """Return the best docs of each query by exact MaxSim over all docs; None: too many docs for this machine."""
    tensors = index._tensors
    if tensors is not None and tensors.stored is not None:
        limit, late_index.EXHAUSTIVE = late_index.EXHAUSTIVE, 2**60
        found = best(index.rank(queries, DEPTH))
        late_index.EXHAUSTIVE = limit
        return found
    if store.num_docs > EXACT_ON_CPU:
        return None
    every = np.arange(store.num_docs)
    return best([(every, exact_scores(query, every, store.of_doc)) for query in query_vectors(queries)])


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    for name, default in (
        ("docs", 1_000_000),
        ("tokens", 60),
        ("dim", 128),
        ("queries", 256),
        ("cpu-queries", 64),
        ("batch", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    gpu, threads = torch.cuda.is_available(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        store, queries = generate(args.folder or Path(scratch), args)
        print(
            f"{store.num_docs} docs, {store.num_vectors} vectors, generated in {time.perf_counter() - started:.0f} s;"
        )
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if gpu else 'no GPU'}, {threads} cores")
        started, spent = time.perf_counter(), time.process_time()
        index = Plaid(gpu=gpu).over(store)
        built = time.perf_counter() - started
        print(f"built and opened on {'the GPU' if gpu else 'the CPU'} in {built:.1f} s, ", end="")
        print(f"{time.process_time() - spent:.1f} s of CPU; {len(index.arrays.centroids.values)} centroids; ", end="")
        print(f"index {index.num_bytes / 1e6:.0f} MB, vectors {store.num_bytes / 1e6:.0f} MB, ", end="")
        print(f"peak memory {peak_gb():.1f} GB, mapped files included", flush=True)
        truth, rates = exact(index, store, queries if gpu else some_of(queries, args.cpu_queries)), {}
        if gpu:
            print(f"memory of the GPU: {torch.cuda.memory_allocated() / 1e9:.1f} GB, ", end="")
            print(f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
            rates["GPU"] = search("GPU", index, queries, args.batch, truth)
            del index
            torch.cuda.empty_cache()
        started, index = time.perf_counter(), Plaid(gpu=False).over(store)
        len(index.arrays.entries)  # the lists of docs at each centroid
        print(f"opened on the CPU in {time.perf_counter() - started:.1f} s")
        for count in dict.fromkeys((1, threads)):
            torch.set_num_threads(count)
            rates[f"CPU, {count} threads"] = search(
                f"CPU, {count} threads", index, some_of(queries, args.cpu_queries), args.batch, truth
            )
        print(f"peak memory of all {peak_gb():.1f} GB, mapped files included")
        times = LARGE / store.num_docs
        print(f"in proportion, {LARGE} docs: build {built * times / 60:.0f} min, ", end="")
        print(f"index {index.num_bytes * times / 1e9:.0f} GB, vectors {store.num_bytes * times / 1e9:.0f} GB; ", end="")
        print("queries/s: " + ", ".join(f"{name} {rate / times:.1f}" for name, rate in rates.items()))


if __name__ == "__main__":
    one_line(main)
