"""The steps of the search command: encode collections, open search engines over them, search, mine hard negatives."""

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
from ranker.errors import ConfigError, DataError
from ranker.models.interface import BiEncoder
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.encode import Device, describe, encode_docs
from ranker.retrieval.impact_store import ImpactStore
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.plaid import Plaid
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.mining import Mining, mine
from ranker.retrieval.search import BM25Engine, Engine, LateOptions, VectorEngine, latencies
from ranker.retrieval.sparse_search import Reranking, SparseEngine
from ranker.retrieval.vector_store import VectorStore, claim
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


def vector_engines(
    scorer: BiEncoder,
    data: RankData,
    sets: Mapping[str, Collection],
    folders: Mapping[str, Path],
    index_type: Any,
    device: Device,
    late: LateOptions,
) -> dict[str, Engine]:
    """Open a search engine for each set; sets of one corpus share its index.

    Args:
        scorer: The bi-encoder, on the device.
        data: Gives the collator of each set.
        sets: Collections by name.
        folders: The folder of vectors of each corpus, from `encode_sets`.
        index_type: Which index to open or build over the vectors; None: the default (`index_of`).
        device: Where to compute.
        late: Options for docs of several vectors.

    Raises:
        ConfigError: The index is not for vectors of this scorer.
    """
    index_type = index_of(scorer, index_type)
    if scorer.vectors == "terms":
        return _sparse_engines(scorer, data, sets, folders, index_type, device)
    opened: dict[str, tuple[VectorStore, Any]] = {}
    engines: dict[str, Engine] = {}
    for name, collection in sets.items():
        fingerprint = collection.docs.fingerprint
        if fingerprint not in opened:
            store = VectorStore(folders[fingerprint])
            started = time.perf_counter()
            opened[fingerprint] = store, open_index(store, index_type)
            log.info(
                "index over %d vectors of %d docs ready in %.1f s",
                store.num_vectors,
                store.num_docs,
                time.perf_counter() - started,
            )
        engines[name] = VectorEngine(scorer, data.collator(collection), *opened[fingerprint], device, late)
    return engines


def open_index(store: VectorStore, index_type: Any) -> Any:
    """Open the index of this type over vectors, or build it.

    Args:
        store: The vectors.
        index_type: The index and its options; one that is not of faiss has a method `over`.
    """
    return index_type.over(store) if hasattr(index_type, "over") else VectorIndex.over(store, index_type)


def index_of(scorer: BiEncoder, index_type: Any) -> Any:
    """Return the index to use: the given one, or the default of a scorer's vectors.

    Args:
        scorer: The bi-encoder.
        index_type: The index and its options; None: flat for one vector per text, plaid for one per token, sparse for
            term weights.

    Raises:
        ConfigError: The index is not for vectors of this scorer.
    """
    suited = {"terms": ["sparse"], "tokens": ["plaid", "flat", "hnsw", "ivf_flat", "ivf_pq"]}.get(
        scorer.vectors, ["flat", "hnsw", "ivf_flat", "ivf_pq"]
    )
    if index_type is None:
        return {"sparse": Sparse, "plaid": Plaid, "flat": Flat}[suited[0]]()
    terms, late = getattr(index_type, "terms", False), getattr(index_type, "late", False)
    if (scorer.vectors == "terms") != terms or (late and scorer.vectors != "tokens"):
        raise ConfigError(
            f"index: expected {', '.join(suited[:-1])}{' or ' if suited[1:] else ''}{suited[-1]} for "
            f"{type(scorer).__name__}, got {type(index_type).__name__.lower()}; set index={suited[0]}"
        )
    return index_type


def check_late(index_type: Any, several: bool, late: LateOptions) -> None:
    """Refuse options of `late` that a search would not read.

    Args:
        index_type: The index, from `index_of`.
        several: Whether docs have a vector per token.
        late: The options.

    Raises:
        ConfigError: An option differs from its default, and docs have no token vectors or the index ranks them itself.
    """
    if several and not getattr(index_type, "late", False):
        return
    name = type(index_type).__module__.rpartition(".")[2]
    reason = "which ranks docs by itself" if several else "whose docs have no token vectors"
    for key, default in vars(LateOptions()).items():
        if getattr(late, key) != default:
            raise ConfigError(
                f"late.{key}: expected the default, {default}, with index={name}, {reason}, got {getattr(late, key)}; "
                "late.* is for token vectors (colbert) with index=flat, hnsw, ivf_flat or ivf_pq"
            )


def _sparse_engines(
    scorer: BiEncoder,
    data: RankData,
    sets: Mapping[str, Collection],
    folders: Mapping[str, Path],
    index_type: Any,
    device: Device,
) -> dict[str, Engine]:
    """Open a search engine by term weights for each set; for the arguments see `vector_engines`."""
    opened: dict[str, tuple[ImpactStore, Any]] = {}
    engines: dict[str, Engine] = {}
    for name, collection in sets.items():
        fingerprint = collection.docs.fingerprint
        if fingerprint not in opened:
            store = ImpactStore(folders[fingerprint])
            started = time.perf_counter()
            opened[fingerprint] = store, index_type.over(store)
            log.info(
                "index over %d weights of %d docs ready in %.1f s",
                store.matrix.nnz,
                store.num_docs,
                time.perf_counter() - started,
            )
        engines[name] = SparseEngine(scorer, data.collator(collection), *opened[fingerprint], device)
    return engines


def bm25_engines(sets: Mapping[str, Collection], make: Callable[..., BM25]) -> dict[str, BM25Engine]:
    """Open a BM25 engine for each set; sets of one corpus share its index. `make` builds an index over docs."""
    indexes: dict[str, BM25] = {}
    for collection in sets.values():
        if collection.docs.fingerprint not in indexes:
            indexes[collection.docs.fingerprint] = make(docs=collection.docs)
    return {name: BM25Engine(collection, indexes[collection.docs.fingerprint]) for name, collection in sets.items()}


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
