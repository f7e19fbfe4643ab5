"""Late-interaction search by index: recall and nDCG against exact MaxSim, queries/s, latency, size, build time.

python benchmarks/late_interaction.py --checkpoint RUN --data FOLDER [--indexes plaid ...] [--device cuda]
python benchmarks/late_interaction.py --docs 1000000 [--tokens 60]   # generated vectors
The first form encodes the collection with a ColBERT and compares each index with exact MaxSim of the same vectors. The
second builds an index over clustered unit vectors of generated docs; queries are tokens of docs, with noise. Search
times do not include the encoding of queries. They are given as wall time and as CPU time of this process, because other
work on the machine lengthens wall times. fast_plaid and warp run if they are installed.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ranker.files import write_folder  # noqa: E402
from ranker.interactions.maxsim import TextVectors  # noqa: E402
from ranker.retrieval.late.exact import exact_scores, query_vectors  # noqa: E402
from ranker.retrieval.vector_store import Description, ShardWriter, VectorStore, claim, shard_folder  # noqa: E402

CLASSES = {"plaid": "Plaid", "fast_plaid": "FastPlaid", "warp": "Warp"}
PACKAGES = {"fast_plaid": "fast_plaid", "warp": "xtr_warp"}


def encoded(checkpoint: Path, data: Path, cache: Path, device: str) -> tuple[VectorStore, TextVectors, list[str], Any]:
    """Return the docs' vectors, the queries' vectors and ids, and the judgements of a collection."""
    from ranker.checkpoint import load_scorer
    from ranker.data.collate import ScorerInputs, TextLimits
    from ranker.data.collection import Splits
    from ranker.data.datamodule import RankData
    from ranker.data.options import BatchOptions
    from ranker.data.sources.files import Files
    from ranker.retrieval.encode import Device, encode_queries
    from ranker.retrieval.pipeline import EncodeOptions, encode_sets

    scorer = load_scorer(checkpoint).to(device)
    (test,) = Files(str(data), val_fraction=0).load().tests.values()
    options, limits = BatchOptions(max_tokens=16384), TextLimits(64, 256)
    source = RankData(Splits(None, None, {"test": test}), ScorerInputs.of(scorer), options, limits, cache_dir=cache)
    where = Device(device, max_tokens=16384)
    folders = encode_sets(scorer, source, {"test": test}, EncodeOptions(cache), where, "32-true")
    ids = [query_id for query_id in test.qrels if query_id in test.queries]
    collator = source.collator(test)
    queries = encode_queries(scorer, collator, collator.queries.rows(ids), where)
    return VectorStore(next(iter(folders.values()))), queries, ids, test.qrels


def generated(folder: Path, docs: int, tokens: int, dim: int, num_queries: int) -> tuple[VectorStore, TextVectors]:
    """Write vectors around one centre per 100 vectors, at least 1,000, and return them with queries of 32 vectors."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(max(1000, min(200_000, docs * tokens // 100)), dim)).astype(np.float32)
    description = Description("generated", str(docs), docs, "cosine", dim, True, "float16", "32-true", tokens, 10_000)
    claim(folder, description)
    queries = []
    for number in range(description.num_shards):
        rows = np.arange(number * 10_000, min((number + 1) * 10_000, docs))
        counts = np.full(len(rows), tokens, dtype=np.int32)
        own = np.random.default_rng([1, number])
        values = centres[own.integers(len(centres), size=counts.sum())]
        values += 0.6 * own.standard_normal(values.shape, dtype=np.float32)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        if not shard_folder(folder, number).is_dir():
            with write_folder(shard_folder(folder, number)) as part:
                ids = np.array([f"d{row:09}".encode() for row in rows.tolist()])
                writer = ShardWriter(part, description, int(rows[0]), ids, counts)
                writer.vectors[:] = values
                writer.finish()
        if len(queries) < num_queries:
            picked = values[: tokens * 20].reshape(-1, tokens, dim)[:, :32] if tokens >= 32 else values[: 32 * 20]
            queries.append(picked.reshape(-1, 32, dim))
    chosen = np.concatenate(queries)[:num_queries]
    chosen = chosen + 0.05 * rng.standard_normal(chosen.shape, dtype=np.float32)
    chosen = torch.nn.functional.normalize(torch.from_numpy(chosen.astype(np.float32)), dim=2)
    return VectorStore(folder), TextVectors(chosen.flatten(0, 1), torch.full((len(chosen),), 32))


def ordered(store: VectorStore, rows: np.ndarray, scores: np.ndarray, depth: int) -> np.ndarray:
    return rows[np.lexsort((store.doc_ids[rows], scores))[::-1][:depth]]


def exact(store: VectorStore, queries: TextVectors, depth: int) -> list[np.ndarray]:
    """Return the rows of the best docs of each query by exact MaxSim with all docs."""
    every = np.arange(store.num_docs)
    started, found = time.process_time(), []
    for query in query_vectors(queries):
        found.append(ordered(store, every, exact_scores(query, every, store.of_doc), depth))
    print(f"exact MaxSim with all docs: {1000 * (time.process_time() - started) / len(found):.0f} ms of CPU a query")
    return found


def ndcg(rankings: list[np.ndarray], store: VectorStore, ids: list[str], qrels: Any) -> float:
    from ranker.evaluation.metrics import evaluate

    run = {
        query_id: {store.doc_ids[row].decode(): float(-place) for place, row in enumerate(rows.tolist())}
        for query_id, rows in zip(ids, rankings, strict=True)
    }
    return evaluate(run, {query_id: qrels[query_id] for query_id in ids}, ["nDCG@10"]).means["nDCG@10"]


def measure(
    name: str, options: dict[str, Any], store: VectorStore, queries: TextVectors, args: argparse.Namespace
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Build an index and search; returns figures and the rows of the best docs of each query."""
    kind = getattr(import_module(f"ranker.retrieval.indexes.{name}"), CLASSES[name])
    started, spent = time.perf_counter(), time.process_time()
    index = kind(gpu=args.device == "cuda", **options).over(store)
    figures = {"built s": time.perf_counter() - started, "built CPU s": time.process_time() - spent}
    index.rank(queries.take(torch.arange(min(4, queries.num_texts))), args.depth)  # compiles
    found, walls, cpus = [], [], []
    for number in range(queries.num_texts):
        one = queries.take(torch.tensor([number]))
        started, spent = time.perf_counter(), time.process_time()
        ((rows, scores),) = index.rank(one, args.depth)
        walls.append(1000 * (time.perf_counter() - started))
        cpus.append(1000 * (time.process_time() - spent))
        found.append(ordered(store, rows, scores, args.depth))
    started, spent = time.perf_counter(), time.process_time()
    for some in torch.arange(queries.num_texts).split(args.batch):
        index.rank(queries.take(some), args.depth)
    figures |= {
        "p50 ms": statistics.median(walls),
        "p50 CPU ms": statistics.median(cpus),
        "queries/s": queries.num_texts / (time.perf_counter() - started),
        "queries/CPU s": queries.num_texts / (time.process_time() - spent),
        "index MB": index.num_bytes / 1e6,
    }
    return figures, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/scifact"))
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--indexes", nargs="*", default=["plaid", "fast_plaid", "warp"])
    parser.add_argument("--options", type=json.loads, default={}, help='options of the indexes, as {"bits": 4}')
    parser.add_argument("--device", default="cpu")
    for name, default in (
        ("docs", 0),
        ("tokens", 60),
        ("dim", 128),
        ("queries", 300),
        ("depth", 100),
        ("batch", 64),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if args.docs:
            folder = Path(scratch)
            store, queries = generated(folder, args.docs, args.tokens, args.dim, args.queries)
            ids, qrels = [], None
        else:
            store, queries, ids, qrels = encoded(args.checkpoint, args.data, args.cache, args.device)
            queries, ids = queries.take(torch.arange(min(args.queries, len(ids)))), ids[: args.queries]
        print(f"{store.num_docs} docs, {store.num_vectors} vectors, {queries.num_texts} queries, depth {args.depth}, ")
        print(f"{args.device}, {args.threads} thread(s), stored vectors {store.num_bytes / 1e6:.0f} MB")
        truth = exact(store, queries, args.depth) if not args.docs else None
        for name in args.indexes:
            if name in PACKAGES and find_spec(PACKAGES[name]) is None:
                print(f"{name}: {PACKAGES[name]} is not installed")
                continue
            figures, found = measure(name, args.options, store, queries, args)
            if truth is not None:
                shares = [len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(found, truth, strict=True)]
                figures["recall@100"] = float(np.mean(shares))
                exact_ndcg = ndcg(truth, store, ids, qrels)
                figures |= {"nDCG@10": ndcg(found, store, ids, qrels), "exact nDCG@10": exact_ndcg}
            figures["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(name, {key: round(value, 4) for key, value in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
