"""An index over a folder of vectors: built by faiss, kept beside them, searched by inner product with exact scores at the end."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.files import checksum, verify, write_whole
from ranker.retrieval.encode import Encoded

log = logging.getLogger(__name__)

TRAINED_PER_LIST = 64  # vectors per centroid that k-means learns from; faiss warns below 39
FEW_PER_LIST = 39
# what faiss can do on a GPU (its wiki, "Faiss on the GPU"): vectors fetched and lists probed; bytes of a compressed
# vector
GPU_MOST = 2048
GPU_SUBVECTORS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)


class Kind(Protocol):
    """A kind of index: conf/index/*.yaml."""

    exact: bool  # whether every vector is compared
    rescore: int  # so many times the vectors asked for are fetched
    gpu: bool | None

    def make(self, dim: int, num_vectors: int) -> Any:
        """An empty faiss index for inner products."""
        ...

    def train_vectors(self, num_vectors: int) -> int:
        """How many vectors it learns from; 0: nothing to learn."""
        ...


def require(key: str, value: int | None) -> int | None:
    """Return a value that is at least 1 or None.

    Raises:
        ConfigError: It is smaller.
    """
    if value is not None and value < 1:
        raise ConfigError(f"{key}: expected at least 1, got {value}")
    return value


def num_lists(asked: int | None, num_vectors: int) -> int:
    """Number of inverted lists: what was asked for, or 4 times the root of the vectors but no more than there are vectors to learn from."""
    return min(asked or max(1, min(int(4 * num_vectors**0.5), num_vectors // FEW_PER_LIST)), max(1, num_vectors))


class VectorIndex:
    """A searchable index; vectors are known by their place in the folder.

    Args:
        index: The filled faiss index.
        kind: What it was made by.
        num_bytes: Its size.
        in_memory: For an index on GPUs, makes its copy in main memory, where more vectors can be fetched; None: it lies
            there.
    """

    def __init__(self, index: Any, kind: Kind, num_bytes: int, in_memory: Callable[[], Any] | None = None) -> None:
        self._index, self.kind, self.num_bytes, self._in_memory = index, kind, num_bytes, in_memory
        self._copy: Any = None
        self._told: set[str] = set()

    @classmethod
    def over(cls, encoded: Encoded, kind: Kind) -> VectorIndex:
        """Open the index of this kind beside the vectors, or build it.

        Raises:
            ConfigError: faiss is missing, or has no GPU where one was asked for.
            CheckpointError: The index that lies there is of other vectors.
            DataError: A vector is not finite, or the index that lies there is damaged.
        """
        faiss = _faiss()
        dim = encoded.description.dim
        path = encoded.folder / f"index-{type(kind).__name__.lower()}-{_digest(kind)}.faiss"
        if path.is_file() and path.with_suffix(".json").is_file():
            index = _read(faiss, path, _meta(kind, encoded))
            if index.ntotal != encoded.num_vectors or index.d != dim or index.metric_type != faiss.METRIC_INNER_PRODUCT:
                raise CheckpointError(
                    f"{path}: expected an index of {encoded.num_vectors} vectors of {dim}; delete it, it is built anew"
                )
            index_settings(kind, index, encoded.num_vectors)
            placed, in_memory = _placed(faiss, index, kind.gpu)
            return cls(placed, kind, path.stat().st_size, in_memory)
        empty = kind.make(dim, max(1, encoded.num_vectors))
        assert empty.metric_type == faiss.METRIC_INNER_PRODUCT
        lists = getattr(empty, "nlist", 1)
        index, in_memory = _placed(faiss, empty, kind.gpu)
        _fill(index, lists, kind, encoded)
        if kind.exact:  # nothing was learned: the vectors themselves are the index
            return cls(index, kind, encoded.num_vectors * dim * 4, in_memory)
        plain = in_memory() if in_memory else index
        _write(faiss, plain, path, _meta(kind, encoded))
        return cls(index, kind, path.stat().st_size, in_memory)

    @property
    def num_vectors(self) -> int:
        """Number of vectors in it."""
        return self._index.ntotal

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The best vectors of each query, best first.

        Args:
            queries: float32 [queries, dim].
            count: Vectors per query; more than there are gives all.

        Returns:
            Inner products (approximate for compressed vectors) and places [queries, min(count, vectors)]; place -1 and
            -inf where the index found fewer.
        """
        count = min(count, self.num_vectors)
        if not len(queries) or not count:
            return np.zeros((len(queries), count), dtype=np.float32), np.zeros((len(queries), count), dtype=np.int64)
        index = self._index if self._in_memory is None or count <= GPU_MOST else self._copied(count)
        hnsw = getattr(index, "hnsw", None)
        if hnsw is not None and hnsw.efSearch < count:
            hnsw.efSearch = count
        scores, places = index.search(np.ascontiguousarray(queries, dtype=np.float32), count)
        empty = places < 0
        if empty.any() and "few" not in self._told:
            self._told.add("few")
            fewest = int((~empty).sum(axis=1).min())
            log.warning(
                "index: %d of %d queries got fewer than %d vectors, the fewest %d; raise index.probes",
                int(empty.any(axis=1).sum()),
                len(queries),
                count,
                fewest,
            )
        return np.where(empty, -np.inf, scores), places

    def _copied(self, count: int) -> Any:
        """The index in main memory."""
        if self._copy is None:
            assert self._in_memory is not None
            log.info("index: a GPU fetches %d vectors at most, %d are asked for: searched on the CPU", GPU_MOST, count)
            self._copy = self._in_memory()
        return self._copy


def index_settings(kind: Kind, index: Any, num_vectors: int) -> None:
    """Put a kind's settings for searching into an index read from disk."""
    fresh = kind.make(index.d, max(1, num_vectors))
    if hasattr(fresh, "nprobe"):
        index.nprobe = fresh.nprobe
    if hasattr(fresh, "hnsw"):
        index.hnsw.efSearch = fresh.hnsw.efSearch


def _fill(index: Any, lists: int, kind: Kind, encoded: Encoded) -> None:
    """Train and fill an empty index."""
    wanted = kind.train_vectors(encoded.num_vectors)
    if wanted and encoded.num_vectors:
        sample = encoded.sample(wanted)
        if len(sample) < FEW_PER_LIST * lists:
            log.warning(
                "index: %d lists learn from %d vectors, fewer than %d each; lower index.lists",
                lists,
                len(sample),
                FEW_PER_LIST,
            )
        index.train(sample)
    place = 0
    for chunk in encoded.chunks():
        bad = np.flatnonzero(~np.isfinite(chunk).all(axis=1))
        if len(bad):
            doc = int(np.searchsorted(encoded.ends, place + bad[0], side="right"))
            raise DataError(
                f"{encoded.folder}: expected finite vectors, got NaN or infinity in that of doc {encoded.doc_ids[doc].decode()!r}; encode again"
            )
        index.add(chunk)
        place += len(chunk)


def _meta(kind: Kind, encoded: Encoded) -> dict[str, Any]:
    """What an index on disk was built of."""
    return {
        "vectors": encoded.description.digest, "num_vectors": encoded.num_vectors, "metric": "inner product",
        "kind": repr(_settings(kind)),
    }  # fmt: skip


def _write(faiss: Any, index: Any, path: Path, meta: dict[str, Any]) -> None:
    """Write an index, and beside it what it was built of and its checksum."""
    with write_whole(path, binary=True) as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
    with write_whole(path.with_suffix(".json")) as file:
        file.write(json.dumps({**meta, "file": checksum(path)}) + "\n")


def _read(faiss: Any, path: Path, meta: dict[str, Any]) -> Any:
    """Read an index that was built of what `meta` says; one of an earlier version has no checksum."""
    fix = f"delete {path}, it is built anew"
    try:
        there = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        stored = there.pop("file", None)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path.with_suffix('.json')}: expected a readable file, got {error}; {fix}") from error
    if there != meta:
        raise CheckpointError(f"{path}: expected an index of {meta}, got one of {there}; {fix}")
    if stored is not None:
        verify(path.parent, {path.name: stored}, f"the file is damaged; {fix}")
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


def _placed(faiss: Any, index: Any, asked: bool | None) -> tuple[Any, Callable[[], Any] | None]:
    """The index, on all GPUs where that was asked for, or is possible and not refused; then also what makes its copy in main memory."""
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if asked and not count:
        raise ConfigError(
            "index.gpu: expected a GPU that faiss sees, got none; install faiss-gpu-cu12, or set index.gpu=null"
        )
    if not count or asked is False:
        return index, None
    unfit = _unfit(index)
    if unfit and asked:
        raise ConfigError(
            f"index.gpu: expected an index that fits a GPU, got {unfit}; change that, or set index.gpu=null"
        )
    if unfit:
        log.info("index: stays on the CPU, since it has %s", unfit)
        return index, None
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = hasattr(
        index, "pq"
    )  # lookup tables only: those of more than 48 subvectors are too large in float32
    moved = faiss.index_cpu_to_all_gpus(index, co=options)
    return moved, lambda: faiss.index_gpu_to_cpu(moved)


def _unfit(index: Any) -> str:
    """What keeps an index off a GPU, empty if nothing does."""
    if getattr(index, "nprobe", 0) > GPU_MOST:
        return f"more than {GPU_MOST} index.probes ({index.nprobe})"
    pq = getattr(index, "pq", None)
    if pq is not None and pq.nbits != 8:
        return f"fewer than 256 vectors ({pq.nbits} bits a code)"
    if pq is not None and pq.M not in GPU_SUBVECTORS:
        return f"{pq.M} index.subvectors, which are none of {', '.join(map(str, GPU_SUBVECTORS))}"
    return ""


def _settings(kind: Kind) -> dict[str, Any]:
    """What decides the built index; how it is searched may change later."""
    return {
        key: value
        for key, value in sorted(vars(kind).items())
        if key not in ("gpu", "probes", "rescore", "search_depth")
    }


def _digest(kind: Kind) -> str:
    return hashlib.blake2b(json.dumps(_settings(kind), sort_keys=True).encode(), digest_size=5).hexdigest()
