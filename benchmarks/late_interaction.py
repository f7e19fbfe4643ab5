"""Late-interaction search by index type: recall and nDCG, compared with exact MaxSim, and speed, latency, size, build.

python benchmarks/late_interaction.py --checkpoint RUN --data FOLDER [--indexes plaid ...] [--device cuda]
The program encodes the collection with a ColBERT, and compares each index with exact MaxSim of the same vectors. Search
times do not include the encoding of queries, which is measured separately. They are given as wall time and as CPU time
of this process, because other work on the machine lengthens wall time. fast_plaid and warp run if they are installed.
late_generated.py measures large collections.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from measuring import Milliseconds  # noqa: E402
from one_line import one_line  # noqa: E402

from ranker.interactions.maxsim import TextVectors  # noqa: E402
from ranker.retrieval.late.exact import exact_scores, query_vectors  # noqa: E402
from ranker.retrieval.vector_store import VectorStore  # noqa: E402

CLASSES = {"plaid": "Plaid", "fast_plaid": "FastPlaid", "warp": "Warp"}
PACKAGES = {"fast_plaid": "fast_plaid", "warp": "xtr_warp"}


def encoded(checkpoint: Path, data: Path, cache: Path, device: str) -> tuple[VectorStore, TextVectors, list[str], Any]:
    """Return the docs' vectors, the queries' vectors and ids, and the judgements of a collection."""
    from ranker.checkpoint import load_scorer
    from ranker.data.collection import Splits
    from ranker.data.datamodule import RankData
    from ranker.data.options import BatchOptions
    from ranker.data.scorer_inputs import ScorerInputs, TextLimits
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
    rows, times = collator.queries.rows(ids), Milliseconds()
    queries = encode_queries(scorer, collator, rows, where)
    for number in range(min(50, len(rows))):
        times.of(encode_queries, scorer, collator, rows[number : number + 1], where)
    wall, cpu = statistics.median(times.walls), statistics.median(times.cpus)
    print(f"encoding one query: p50 {wall:.2f} ms, {cpu:.2f} ms of CPU")
    return VectorStore(next(iter(folders.values()))), queries, ids, test.qrels


def ordered(store: VectorStore, rows: np.ndarray, scores: np.ndarray, depth: int) -> np.ndarray:
    return rows[np.lexsort((store.doc_ids[rows], scores))[::-1][:depth]]


def exact(store: VectorStore, queries: TextVectors, depth: int) -> list[np.ndarray]:
    """Return the indices of the best docs of each query by exact MaxSim over all docs."""
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
    """Build an index and search; return the results and the indices of the best docs of each query."""
    kind = getattr(import_module(f"ranker.retrieval.indexes.{name}"), CLASSES[name])
    started, spent = time.perf_counter(), time.process_time()
    index = kind(gpu=args.device == "cuda", **options).over(store)
    figures = {"built s": time.perf_counter() - started, "built CPU s": time.process_time() - spent}
    index.rank(queries.take(torch.arange(min(4, queries.num_texts))), args.depth)  # this call compiles kernels
    found, times = [], Milliseconds()
    for number in range(queries.num_texts):
        ((rows, scores),) = times.of(index.rank, queries.take(torch.tensor([number])), args.depth)
        found.append(ordered(store, rows, scores, args.depth))
    started, spent = time.perf_counter(), time.process_time()
    for some in torch.arange(queries.num_texts).split(args.batch):
        index.rank(queries.take(some), args.depth)
    figures |= {
        "p50 ms": statistics.median(times.walls),
        "p50 CPU ms": statistics.median(times.cpus),
        "queries/s": queries.num_texts / (time.perf_counter() - started),
        "queries/CPU s": queries.num_texts / (time.process_time() - spent),
        "index MB": index.num_bytes / 1e6,
    }
    return figures, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/scifact"))
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--indexes", nargs="*", default=["plaid", "fast_plaid", "warp"])
    parser.add_argument("--options", type=json.loads, default={}, help='options of the indexes, as {"bits": 4}')
    parser.add_argument("--device", default="cpu")
    for name, default in (
        ("queries", 300),
        ("depth", 100),
        ("batch", 64),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    store, queries, ids, qrels = encoded(args.checkpoint, args.data, args.cache, args.device)
    queries, ids = queries.take(torch.arange(min(args.queries, len(ids)))), ids[: args.queries]
    print(f"{store.num_docs} docs, {store.num_vectors} vectors, {queries.num_texts} queries, depth {args.depth}, ")
    print(f"{args.device}, {args.threads} thread(s), stored vectors {store.num_bytes / 1e6:.0f} MB")
    truth = exact(store, queries, args.depth)
    for name in args.indexes:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            print(f"{name}: {PACKAGES[name]} is not installed")
            continue
        figures, found = measure(name, args.options, store, queries, args)
        shares = [len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(found, truth, strict=True)]
        figures["recall"] = float(np.mean(shares))  # recall at args.depth
        figures |= {"nDCG@10": ndcg(found, store, ids, qrels), "exact nDCG@10": ndcg(truth, store, ids, qrels)}
        figures["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(name, {key: round(value, 4) for key, value in figures.items()}, flush=True)


if __name__ == "__main__":
    one_line(main)
