"""Open the search engines of collections: by vectors, by term weights, or by BM25; and choose the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ranker.data.collection import Collection
from ranker.data.datamodule import RankData
from ranker.errors import ConfigError
from ranker.models.interface import BiEncoder
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.encode import Device
from ranker.retrieval.impact_store import ImpactStore
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.plaid import Plaid
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.search import BM25Engine, Engine
from ranker.retrieval.sparse_search import SparseEngine
from ranker.retrieval.vector_engine import LateOptions, VectorEngine
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)


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
    sparse = scorer.vectors == "terms"
    opened: dict[str, tuple[Any, Any]] = {}
    engines: dict[str, Engine] = {}
    for name, collection in sets.items():
        fingerprint = collection.docs.fingerprint
        if fingerprint not in opened:
            folder = folders[fingerprint]
            store: Any = ImpactStore(folder) if sparse else VectorStore(folder)
            started = time.perf_counter()
            opened[fingerprint] = store, open_index(store, index_type)
            log.info(
                "index over %d %s of %d docs ready in %.1f s",
                store.matrix.nnz if sparse else store.num_vectors,
                "weights" if sparse else "vectors",
                store.num_docs,
                time.perf_counter() - started,
            )
        collator = data.collator(collection)
        if sparse:
            engines[name] = SparseEngine(scorer, collator, *opened[fingerprint], device)
        else:
            engines[name] = VectorEngine(scorer, collator, *opened[fingerprint], device, late)
    return engines


def open_index(store: Any, index_type: Any) -> Any:
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


def bm25_engines(sets: Mapping[str, Collection], make: Callable[..., BM25]) -> dict[str, BM25Engine]:
    """Open a BM25 engine for each set; sets of one corpus share its index. `make` builds an index over docs."""
    indexes: dict[str, BM25] = {}
    for collection in sets.values():
        if collection.docs.fingerprint not in indexes:
            indexes[collection.docs.fingerprint] = make(docs=collection.docs)
    return {name: BM25Engine(collection, indexes[collection.docs.fingerprint]) for name, collection in sets.items()}
