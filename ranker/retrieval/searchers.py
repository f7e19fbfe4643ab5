"""From sets of queries to search engines over their docs, and from engines to runs, figures and negatives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.datamodule import RankData
from ranker.data.query_docs import has_own_id, warn_of_query_docs
from ranker.errors import DataError
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.encode import Device, Encoded, claim, describe, encode_docs
from ranker.retrieval.index import Kind, VectorIndex
from ranker.retrieval.mining import Mining, mine
from ranker.retrieval.search import BM25Engine, Engine, LateOptions, VectorEngine, latencies
from ranker.types import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeOptions:
    """Where vectors are kept, and how.

    Args:
        cache_dir: Folder of all caches; vectors go into a folder named by the hash of all that they depend on.
        folder: A folder of one's own instead; refused if it was made of anything else.
        dtype: Of the stored vectors: float32 or float16.
        shard_docs: Docs per shard.
    """

    cache_dir: Path
    folder: Path | None = None
    dtype: str = "float32"
    shard_docs: int = 10000


def encode_sets(
    scorer: Any, data: RankData, sets: Mapping[str, Collection], options: EncodeOptions, where: Device, precision: str
) -> dict[str, Path]:  # fmt: skip
    """Encode this process's share of the docs of all sets, each corpus once; returns the folder of each corpus by its fingerprint.

    Raises:
        DataError: Two corpora, and one folder asked for.
    """
    folders: dict[str, Path] = {}
    for collection in sets.values():
        fingerprint = collection.docs.fingerprint
        if fingerprint in folders:
            continue
        if options.folder is not None and folders:
            raise DataError(
                f"encode.folder: expected one corpus for {options.folder}, got several; set encode.folder=null"
            )
        collator = data.collator(collection)
        description = describe(
            scorer, collator.docs, fingerprint, collator.max_doc_tokens, options.dtype, precision, options.shard_docs
        )  # fmt: skip
        folder = options.folder or options.cache_dir / "encoded" / description.digest
        claim(folder, description)
        started = time.perf_counter()
        done = encode_docs(scorer, collator, folder, description, where)
        if done:
            log.info("%s: encoded %d docs in %.1f s", folder, done, time.perf_counter() - started)
        folders[fingerprint] = folder
    return folders


def vector_engines(
    scorer: Any, data: RankData, sets: Mapping[str, Collection], encoded: Mapping[str, Path], kind: Kind, where: Device, late: LateOptions
) -> dict[str, VectorEngine]:  # fmt: skip
    """An engine for each set; sets of one corpus share its index."""
    opened: dict[str, tuple[Encoded, VectorIndex]] = {}
    engines = {}
    for name, collection in sets.items():
        fingerprint = collection.docs.fingerprint
        if fingerprint not in opened:
            vectors = Encoded(encoded[fingerprint])
            started = time.perf_counter()
            opened[fingerprint] = vectors, VectorIndex.over(vectors, kind)
            log.info(
                "index over %d vectors of %d docs ready in %.1f s",
                vectors.num_vectors,
                vectors.num_docs,
                time.perf_counter() - started,
            )
        engines[name] = VectorEngine(scorer, data.collator(collection), *opened[fingerprint], where, late)
    return engines


def bm25_engines(sets: Mapping[str, Collection], make: Callable[..., BM25]) -> dict[str, BM25Engine]:
    """An engine for each set; sets of one corpus share its index."""
    made: dict[str, BM25] = {}
    for collection in sets.values():
        if collection.docs.fingerprint not in made:
            made[collection.docs.fingerprint] = make(docs=collection.docs)
    return {name: BM25Engine(collection, made[collection.docs.fingerprint]) for name, collection in sets.items()}


def search_set(engine: Engine, collection: Collection, depth: int, latency_queries: int) -> tuple[Run, dict[str, Any]]:
    """Search for all judged queries; for all queries where none is judged.

    Returns:
        The run, and what the search cost: queries, seconds, queries per second, milliseconds per query (p50, p95),
        bytes of the index and of the stored vectors beside it.
    """
    queries = [query_id for query_id in collection.qrels or collection.queries if query_id in collection.queries]
    blank = [query_id for query_id in queries if not collection.queries[query_id].strip()]
    if blank:
        log.warning("%s: %d queries have no text, the first is %r", collection.name, len(blank), blank[0])
    started = time.perf_counter()
    found = _search(engine, collection, queries, depth)
    seconds = time.perf_counter() - started
    warn_of_query_docs(collection, found)
    spent = latencies(engine, queries, depth, latency_queries)
    report = {
        "queries": len(queries),
        "depth": depth,
        "seconds": seconds,
        "queries_per_second": len(queries) / seconds if seconds else None,
        "latency_ms": {"p50": float(np.percentile(spent, 50)), "p95": float(np.percentile(spent, 95))}
        if len(spent)
        else None,
        "index_bytes": engine.num_bytes,
        "vector_bytes": engine.vector_bytes,
        "docs": len(collection.docs),
    }
    return found.to_run(), report


def in_words(report: Mapping[str, Any]) -> str:
    """A search's costs on a line."""
    latency = report["latency_ms"]
    one = f", one at a time p50 {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms" if latency else ""
    stored = f", stored vectors {report['vector_bytes'] / 1e6:.1f} MB" if report["vector_bytes"] else ""
    return f"{report['queries']} queries over {report['docs']} docs in {report['seconds']:.1f} s{one}; index {report['index_bytes'] / 1e6:.1f} MB{stored}"


def mine_set(engine: Engine, collection: Collection, options: Mining, teacher: Run | None) -> Run:
    """Search for the queries that have a relevant doc, and choose their hard negatives."""
    relevant = [
        query_id
        for query_id, judged in collection.qrels.items()
        if query_id in collection.queries and any(grade >= collection.relevance for grade in judged.values())
    ]
    return mine(_search(engine, collection, relevant, options.last), collection, options, engine.score, teacher)


def _search(engine: Engine, collection: Collection, queries: Sequence[str], depth: int) -> Candidates:
    """The best docs of queries, without the docs that are the queries where `collection.drop_query_docs`."""
    if not collection.drop_query_docs:
        return engine.search(queries, depth)
    found = engine.search(queries, depth + 1)
    return found.where(~has_own_id(found)).top(depth)


def add_positives(collection: Collection, depth: int) -> Collection:
    """The first `depth` candidates, and all known positives after them: for a teacher's scores, not for measures."""
    candidates = collection.candidates
    assert candidates is not None
    ranked = []
    for query_id in collection.qrels:
        ids, scores = (
            candidates[query_id][:depth] if query_id in candidates else [],
            candidates.scores_of(query_id)[:depth].tolist(),
        )
        lacking = [
            doc_id
            for doc_id, grade in collection.qrels[query_id].items()
            if grade >= collection.relevance
            and doc_id in collection.docs
            and doc_id not in set(ids)
            and not (collection.drop_query_docs and doc_id == query_id)
        ]
        lowest = min(scores, default=0.0)
        ranked.append((query_id, [*ids, *lacking], [*scores, *(lowest - 1 - place for place in range(len(lacking)))]))
    return replace(collection, candidates=Candidates.from_lists(ranked))
