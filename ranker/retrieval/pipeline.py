"""The steps of the search command: encode collections, open search engines over them, search, mine hard negatives."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.datamodule import RankData
from ranker.data.query_docs import has_own_id, warn_of_query_docs
from ranker.errors import DataError
from ranker.models.interface import BiEncoder
from ranker.retrieval.encode import Device, describe, encode_docs
from ranker.retrieval.mining import Mining, mine
from ranker.retrieval.search import Engine, latencies
from ranker.retrieval.sparse_search import Reranking, SparseEngine
from ranker.retrieval.vector_folder import claim
from ranker.types import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeOptions:
    """Where and how vectors of docs are stored.

    Args:
        cache_dir: Folder of all caches. Vectors go to its subfolder `encoded/HASH`; the hash covers everything that
            determines the vectors.
        folder: A folder to use instead; refused if it holds vectors of another model or of other docs.
        dtype: Type of the stored vectors: `float32` or `float16`.
        shard_docs: Docs per shard.
    """

    cache_dir: Path
    folder: Path | None = None
    dtype: str = "float32"
    shard_docs: int = 10000


def encode_sets(
    scorer: BiEncoder,
    data: RankData,
    sets: Mapping[str, Collection],
    options: EncodeOptions,
    device: Device,
    precision: str,
) -> dict[str, Path]:
    """Encode this process's share of the docs of all sets, each corpus once.

    Args:
        scorer: The bi-encoder, on the device.
        data: Gives the collator of each set.
        sets: Collections by name; several may share a corpus.
        options: Where and how vectors are stored.
        device: Device and share of this process.
        precision: Precision of the forward pass, as Lightning names it.

    Returns:
        The folder of vectors of each corpus, by the fingerprint of its docs.

    Raises:
        CheckpointError: A folder holds vectors of another model or of other docs.
        DataError: `options.folder` is set, but there are several corpora; or a vector is not finite.
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
        )
        folder = options.folder or options.cache_dir / "encoded" / description.digest
        claim(folder, description)
        started = time.perf_counter()
        done = encode_docs(scorer, collator, folder, description, device)
        if done:
            log.info("%s: encoded %d docs in %.1f s", folder, done, time.perf_counter() - started)
        folders[fingerprint] = folder
    return folders


def search_set(engine: Engine, collection: Collection, depth: int, latency_queries: int) -> tuple[Run, dict[str, Any]]:
    """Search the judged queries of a collection, or all queries if none is judged.

    Args:
        engine: The search engine over its docs.
        collection: The collection.
        depth: Docs per query.
        latency_queries: Number of queries that are searched one at a time to measure the latency.

    Returns:
        The run, and what the search cost: queries, seconds and queries per second of all queries together,
        milliseconds of single queries (p50, p95) and of their parts (`latencies`), bytes of the index and of the stored
        vectors beside it; of a sparse ranker also the numbers of `SparseEngine.figures`.
    """
    queries = [query_id for query_id in collection.qrels or collection.queries if query_id in collection.queries]
    blank = [query_id for query_id in queries if not collection.queries[query_id].strip()]
    if blank:
        log.warning("%s: %d queries have no text, the first is %r", collection.name, len(blank), blank[0])
    started = time.perf_counter()
    ranking = _search(engine, collection, queries, depth)
    seconds = time.perf_counter() - started
    warn_of_query_docs(collection, ranking)
    parts = {name: _percentiles(part) for name, part in latencies(engine, queries, depth, latency_queries).items()}
    latency = parts.pop("search", None)
    report = {
        "queries": len(queries),
        "depth": depth,
        "seconds": seconds,
        "queries_per_second": len(queries) / seconds if seconds else None,
        "latency_ms": latency,
        "parts_ms": parts or None,
        "index_bytes": engine.num_bytes,
        "vector_bytes": engine.vector_bytes,
        "docs": len(collection.docs),
        **(engine.figures(queries) if isinstance(engine, (SparseEngine, Reranking)) else {}),
    }
    return ranking.to_run(), report


def _percentiles(milliseconds: np.ndarray) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(milliseconds, percent)) for percent in (50, 95) if len(milliseconds)}


def in_words(report: Mapping[str, Any]) -> str:
    """Return the report of `search_set` as one line of text."""
    latency = report["latency_ms"]
    rate = report["queries_per_second"]
    together = f", {rate:.0f} queries/s" if rate else ""
    single = f", one at a time p50 {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms" if latency else ""
    if report["parts_ms"]:
        parts = (f"{name} {part['p50']:.1f}" for name, part in report["parts_ms"].items())
        single += f" (p50 of {', '.join(parts)} ms)"
    stored = f", stored vectors {report['vector_bytes'] / 1e6:.1f} MB" if report["vector_bytes"] else ""
    terms = ""
    if "flops" in report:
        terms = (
            f"; {report['query_terms']:.1f} terms a query, {report['doc_terms']:.1f} a doc, "
            f"{report['flops']:.2f} products a pair"
            + (f", recall@10 {report['recall@10']:.3f} of the exact search" if "recall@10" in report else "")
        )
    return (
        f"{report['queries']} queries over {report['docs']} docs in {report['seconds']:.1f} s"
        f"{together}{single}; "
        f"index {report['index_bytes'] / 1e6:.1f} MB{stored}{terms}"
    )


def mine_set(engine: Engine, collection: Collection, options: Mining, teacher: Run | None) -> Run:
    """Search the queries that have a relevant doc, and choose their hard negatives; for the arguments see `mine`."""
    relevant = [
        query_id
        for query_id, judged in collection.qrels.items()
        if query_id in collection.queries and any(grade >= collection.relevance for grade in judged.values())
    ]
    return mine(_search(engine, collection, relevant, options.last), collection, options, engine.score, teacher)


def _search(engine: Engine, collection: Collection, queries: Sequence[str], depth: int) -> Candidates:
    """Search queries; with `collection.drop_query_docs`, leave out docs that have the query's own id."""
    if not collection.drop_query_docs:
        return engine.search(queries, depth)
    ranking = engine.search(queries, depth + 1)
    return ranking.where(~has_own_id(ranking)).top(depth)


def add_positives(collection: Collection, depth: int) -> Collection:
    """Return the collection with its first `depth` candidates per query, followed by all known positives.

    Use it to get a teacher's scores, not to measure: the added positives would raise the measures.
    """
    candidates = collection.candidates
    assert candidates is not None
    ranked = []
    for query_id in collection.qrels:
        ids = candidates[query_id][:depth] if query_id in candidates else []
        scores = candidates.scores_of(query_id)[:depth].tolist()
        listed = set(ids)
        missing = [
            doc_id
            for doc_id, grade in collection.qrels[query_id].items()
            if grade >= collection.relevance
            and doc_id in collection.docs
            and doc_id not in listed
            and not (collection.drop_query_docs and doc_id == query_id)
        ]
        lowest = min(scores, default=0.0)
        ranked.append((query_id, [*ids, *missing], [*scores, *(lowest - 1 - i for i in range(len(missing)))]))
    return replace(collection, candidates=Candidates.from_lists(ranked))
