"""A faiss index over a folder of vectors: built once, stored beside them, searched by inner product."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.retrieval.index_files import index_meta, index_path, read_index, write_index
from ranker.retrieval.index_gpus import GPU_MAX, to_gpus
from ranker.retrieval.index_type import FEW_PER_LIST, IndexType
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)


class VectorIndex:
    """A filled index; a vector is identified by its index in the vector store.

    Args:
        index: The faiss index.
        index_type: Its type and options.
        num_bytes: Its size.
        to_memory: Copies an index on GPUs to main memory, where a search can fetch more vectors. None: the index is in
            main memory.
    """

    def __init__(
        self, index: Any, index_type: IndexType, num_bytes: int, to_memory: Callable[[], Any] | None = None
    ) -> None:
        self._index, self.index_type, self.num_bytes, self._to_memory = index, index_type, num_bytes, to_memory
        self._copy: Any = None
        self.stages = Stages()
        self._warned = False

    @classmethod
    def over(cls, store: VectorStore, index_type: IndexType) -> VectorIndex:
        """Open the index of this type that is stored beside the vectors, or build it.

        Raises:
            ConfigError: faiss is missing, or `index.gpu` is true and faiss has no GPU.
            CheckpointError: The stored index was built over other vectors.
            DataError: A vector is not finite, or the stored index is damaged.
        """
        faiss = _faiss()
        dim, num_vectors = store.description.dim, store.num_vectors
        path = index_path(index_type, store)
        if path.is_file() and path.with_suffix(".json").is_file():
            index = read_index(faiss, path, index_meta(index_type, store))
            if index.ntotal != num_vectors or index.d != dim or index.metric_type != faiss.METRIC_INNER_PRODUCT:
                raise CheckpointError(
                    f"{path}: expected an index of {num_vectors} vectors of {dim}; delete it, it is built anew"
                )
            apply_search_options(index_type, index, num_vectors)
            index, to_memory = to_gpus(faiss, index, index_type.gpu)
            return cls(index, index_type, path.stat().st_size, to_memory)
        empty = index_type.make(dim, max(1, num_vectors))
        assert empty.metric_type == faiss.METRIC_INNER_PRODUCT
        lists = getattr(empty, "nlist", 1)
        index, to_memory = to_gpus(faiss, empty, index_type.gpu)
        _fill(index, lists, index_type, store)
        if index_type.exact:  # not stored: it is a copy of the vectors
            return cls(index, index_type, num_vectors * dim * 4, to_memory)
        write_index(faiss, to_memory() if to_memory else index, path, index_meta(index_type, store))
        return cls(index, index_type, path.stat().st_size, to_memory)

    @property
    def num_vectors(self) -> int:
        """Number of vectors."""
        return self._index.ntotal

    @property
    def rescore(self) -> int:
        """Number of vectors that are fetched for the exact comparison, as a multiple of the requested number."""
        return self.index_type.rescore

    def margin(self, query: np.ndarray) -> float:  # noqa: ARG002
        """Return the largest amount by which an inner product with a query may exceed the exact one."""
        return 1e-5

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the best vectors of each query, best first.

        Args:
            queries: Query vectors, float32 [queries, dim].
            count: Vectors per query; all if there are fewer.

        Returns:
            Inner products (approximate for compressed vectors), float32, and indices of vectors, int64, both
            [queries, min(count, vectors)]. Where the index returns fewer vectors, the rest is -inf and -1.
        """
        count = min(count, self.num_vectors)
        if not len(queries) or not count:
            return np.zeros((len(queries), count), dtype=np.float32), np.zeros((len(queries), count), dtype=np.int64)
        index = self._index if self._to_memory is None or count <= GPU_MAX else self._copied(count)
        hnsw = getattr(index, "hnsw", None)
        if hnsw is not None and hnsw.efSearch < count:
            hnsw.efSearch = count
        scores, indices = index.search(np.ascontiguousarray(queries, dtype=np.float32), count)
        empty = indices < 0
        if empty.any() and not self._warned:
            self._warned = True
            fewest = int((~empty).sum(axis=1).min())
            log.warning(
                "index: %d of %d queries got fewer than %d vectors, the fewest %d; raise index.probes",
                int(empty.any(axis=1).sum()),
                len(queries),
                count,
                fewest,
            )
        return np.where(empty, -np.inf, scores), indices

    def _copied(self, count: int) -> Any:
        """Return the copy of a GPU index in main memory, for a search of more vectors than a GPU fetches."""
        if self._copy is None:
            assert self._to_memory is not None
            log.info("index: a GPU fetches at most %d vectors, the search needs %d: it runs on the CPU", GPU_MAX, count)
            self._copy = self._to_memory()
        return self._copy


def apply_search_options(index_type: IndexType, index: Any, num_vectors: int) -> None:
    """Set the search options of `index_type` in an index that was read from disk."""
    fresh = index_type.make(index.d, max(1, num_vectors))
    if hasattr(fresh, "nprobe"):
        index.nprobe = fresh.nprobe
    if hasattr(fresh, "hnsw"):
        index.hnsw.efSearch = fresh.hnsw.efSearch


def _fill(index: Any, lists: int, index_type: IndexType, store: VectorStore) -> None:
    """Train an empty index and add all vectors."""
    num_trained = index_type.train_vectors(store.num_vectors)
    if num_trained and store.num_vectors:
        sample = store.sample(num_trained)
        if len(sample) < FEW_PER_LIST * lists:
            log.warning(
                "index: %d lists learn from %d vectors, fewer than %d each; lower index.lists",
                lists,
                len(sample),
                FEW_PER_LIST,
            )
        index.train(sample)
    num_added = 0
    for chunk in store.chunks():
        refuse_not_finite(store, chunk, num_added)
        index.add(chunk)
        num_added += len(chunk)


def refuse_not_finite(store: VectorStore, vectors: np.ndarray, first: int) -> None:
    """Refuse vectors with NaN or infinity.

    Args:
        store: The store that they are from.
        vectors: Some of its vectors, one after another [vectors, dim].
        first: Index of the first of them.

    Raises:
        DataError: A vector is not finite; the message names its doc.
    """
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        doc = int(np.searchsorted(store.ends, first + bad[0], side="right"))
        raise DataError(
            f"{store.folder}: expected finite vectors, got NaN or infinity for doc "
            f"{store.doc_ids[doc].decode()!r}; encode again"
        )


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "index: expected faiss, got no such package; install it with: pip install -e '.[cpu]' (or '.[gpu]')"
        ) from error
    return faiss
