"""A faiss index over a folder of vectors: built once, stored beside them, searched by inner product."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.files.checksums import checksum, verify
from ranker.files.writing import write_whole
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)

Number = TypeVar("Number", bound=float | None)
TRAINED_PER_LIST = 64  # training vectors per centroid of k-means
FEW_PER_LIST = 39  # faiss warns if there are fewer training vectors per centroid
# limits on a GPU (faiss's wiki, "Faiss on the GPU"): maximum of vectors fetched and of lists probed; allowed sizes of a
# compressed vector in bytes
GPU_MAX = 2048
GPU_SUBVECTORS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)


class IndexType(Protocol):
    """A type of index with its options: conf/index/*.yaml.

    Attributes:
        exact: Whether the query is compared with every vector.
        rescore: Number of vectors that are fetched for the exact comparison, as a multiple of the requested number.
        gpu: Whether to search on all GPUs; None: yes if faiss sees one.
    """

    exact: bool
    rescore: int
    gpu: bool | None

    def make(self, dim: int, num_vectors: int) -> Any:
        """Return an empty faiss index for inner products of vectors [num_vectors, dim]."""
        ...

    def train_vectors(self, num_vectors: int) -> int:
        """Return the number of vectors that the index is trained on; 0: it needs no training."""
        ...


def require(key: str, value: Number) -> Number:
    """Return a value that is None or at least 1.

    Raises:
        ConfigError: The value is below 1.
    """
    if value is not None and value < 1:
        raise ConfigError(f"{key}: expected at least 1, got {value}")
    return value


def num_lists(lists: int | None, num_vectors: int) -> int:
    """Return the number of inverted lists, at most `num_vectors`.

    Args:
        lists: The configured number; None: 4 times the square root of `num_vectors`, but at least `FEW_PER_LIST`
            vectors per list.
        num_vectors: Number of vectors.
    """
    default = max(1, min(int(4 * num_vectors**0.5), num_vectors // FEW_PER_LIST))
    return min(lists or default, max(1, num_vectors))


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
        path = store.folder / f"index-{type(index_type).__name__.lower()}-{_digest(index_type)}.faiss"
        if path.is_file() and path.with_suffix(".json").is_file():
            index = _read(faiss, path, _meta(index_type, store))
            if index.ntotal != num_vectors or index.d != dim or index.metric_type != faiss.METRIC_INNER_PRODUCT:
                raise CheckpointError(
                    f"{path}: expected an index of {num_vectors} vectors of {dim}; delete it, it is built anew"
                )
            apply_search_options(index_type, index, num_vectors)
            index, to_memory = _to_gpus(faiss, index, index_type.gpu)
            return cls(index, index_type, path.stat().st_size, to_memory)
        empty = index_type.make(dim, max(1, num_vectors))
        assert empty.metric_type == faiss.METRIC_INNER_PRODUCT
        lists = getattr(empty, "nlist", 1)
        index, to_memory = _to_gpus(faiss, empty, index_type.gpu)
        _fill(index, lists, index_type, store)
        if index_type.exact:  # not stored: it is a copy of the vectors
            return cls(index, index_type, num_vectors * dim * 4, to_memory)
        _write(faiss, to_memory() if to_memory else index, path, _meta(index_type, store))
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


def _meta(index_type: IndexType, store: VectorStore) -> dict[str, Any]:
    """Return what a stored index depends on: its vectors and its options."""
    return {
        "vectors": store.description.digest,
        "num_vectors": store.num_vectors,
        "metric": "inner product",
        "kind": repr(_settings(index_type)),
    }


def _write(faiss: Any, index: Any, path: Path, meta: dict[str, Any]) -> None:
    """Write an index, and beside it a JSON file with `meta` and the checksum of the index."""
    with write_whole(path, binary=True) as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
    with write_whole(path.with_suffix(".json")) as file:
        file.write(json.dumps({**meta, "file": checksum(path)}) + "\n")


def _read(faiss: Any, path: Path, meta: dict[str, Any]) -> Any:
    """Read an index if its JSON file agrees with `meta`; an index of an earlier version has no checksum."""
    fix = f"delete {path}, it is built anew"
    try:
        stored_meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        stored_checksum = stored_meta.pop("file", None)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path.with_suffix('.json')}: expected a readable file, got {error}; {fix}") from error
    if stored_meta != meta:
        raise CheckpointError(f"{path}: expected an index of {meta}, got one of {stored_meta}; {fix}")
    if stored_checksum is not None:
        verify(path.parent, {path.name: stored_checksum}, f"the file is damaged; {fix}")
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path}: expected an index that faiss can read, got {' '.join(str(error).split())[:200]}; {fix}"
        ) from error


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "index: expected faiss, got no such package; install it with: pip install -e '.[cpu]' (or '.[gpu]')"
        ) from error
    return faiss


def _to_gpus(faiss: Any, index: Any, gpu: bool | None) -> tuple[Any, Callable[[], Any] | None]:
    """Move an index to all GPUs if `gpu` is true, or if it is None and faiss can do it.

    Returns:
        The index, and, if it moved, a function that copies it to main memory.

    Raises:
        ConfigError: `gpu` is true, and faiss has no GPU or the index exceeds a GPU's limits.
    """
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if gpu and not count:
        raise ConfigError(
            "index.gpu: expected a GPU that faiss sees, got none; install faiss-gpu-cu12, or set index.gpu=null"
        )
    if not count or gpu is False:
        return index, None
    excess = _gpu_excess(index)
    if excess and gpu:
        raise ConfigError(
            f"index.gpu: expected an index that fits a GPU, got {excess}; change that, or set index.gpu=null"
        )
    if excess:
        log.info("index: stays on the CPU, since it has %s", excess)
        return index, None
    options = faiss.GpuMultipleClonerOptions()
    # half precision for lookup tables only: for more than 48 subvectors they are too large in float32
    options.useFloat16 = hasattr(index, "pq")
    moved = faiss.index_cpu_to_all_gpus(index, co=options)
    return moved, lambda: faiss.index_gpu_to_cpu(moved)


def _gpu_excess(index: Any) -> str:
    """Return the option of an index that exceeds a GPU's limits; empty if none does."""
    if getattr(index, "nprobe", 0) > GPU_MAX:
        return f"more than {GPU_MAX} index.probes ({index.nprobe})"
    pq = getattr(index, "pq", None)
    if pq is not None and pq.nbits != 8:
        return f"fewer than 256 vectors ({pq.nbits} bits a code)"
    if pq is not None and pq.M not in GPU_SUBVECTORS:
        return f"{pq.M} index.subvectors, which are none of {', '.join(map(str, GPU_SUBVECTORS))}"
    return ""


def _settings(index_type: IndexType) -> dict[str, Any]:
    """Return the options that determine the stored index; search options may change later."""
    search_options = ("gpu", "probes", "rescore", "search_depth")
    return {key: value for key, value in sorted(vars(index_type).items()) if key not in search_options}


def _digest(index_type: IndexType) -> str:
    return hashlib.blake2b(json.dumps(_settings(index_type), sort_keys=True).encode(), digest_size=5).hexdigest()
