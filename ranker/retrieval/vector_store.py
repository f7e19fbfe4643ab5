"""Vectors of a collection on disk: a folder of shards, which hold the docs' ids and vectors.

A folder has `encoded.json` (its `Description`) and a folder per shard with the files

- `vectors.bin`: the vectors of its docs in order, [vectors, dim] of `dtype`;
- `counts.bin`: number of vectors of each doc, int32 [docs]; only where a doc has several;
- `ids.bin`: id of each doc, UTF-8 bytes of one width [docs];
- `meta.json`: first doc, number of docs and of vectors, bytes of an id;

and its checksums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from ranker.data.ragged import ranges
from ranker.data.token_writer import map_array
from ranker.errors import CheckpointError, DataError
from ranker.files.checksums import REBUILD, THREADS, verify_folder
from ranker.files.space import reserve
from ranker.files.writing import write_whole
from ranker.interactions.maxsim import TextVectors
from ranker.run_folder import check_unused

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when the files change
LOG_SECONDS = 30


@dataclass(frozen=True)
class Description:
    """What the vectors of a folder were computed from, and how; a folder with another description is refused.

    Args:
        scorer: Hash of weights, tokenizer and settings (`ranker.retrieval.encode.scorer_hash`).
        docs: Fingerprint of the collection's docs.
        num_docs: Number of docs.
        similarity: `cosine` (vectors of length 1) or `dot`; both are searched by inner product.
        dim: Size of a vector.
        several: Whether a doc has a vector per token.
        dtype: Type of the stored vectors: `float32` or `float16`.
        precision: Precision of the forward pass, as Lightning names it.
        max_doc_tokens: Maximum tokens of a doc, without special tokens; longer docs were cut.
        shard_docs: Docs per shard.
        format: Version of the files.
    """

    scorer: str
    docs: str
    num_docs: int
    similarity: str
    dim: int
    several: bool
    dtype: str
    precision: str
    max_doc_tokens: int
    shard_docs: int
    format: int = FORMAT

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.num_docs // self.shard_docs)

    @property
    def digest(self) -> str:
        """Short hash of all fields, for folder names."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=10).hexdigest()


def claim(folder: Path, description: Description) -> None:
    """Write the description into a new folder of vectors, or compare it with the one in an existing folder.

    Raises:
        CheckpointError: The folder's vectors are of another model or of other docs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "encoded.json"
    with FileLock(folder / ".lock"):
        if not path.is_file():
            check_unused(
                "encode.folder", folder, [".lock", *(file.name for file in folder.glob(f".*.{path.name}.partial"))]
            )
            with write_whole(path) as file:
                file.write(json.dumps(asdict(description), indent=1) + "\n")
    stored = read_description(folder)
    for key, reason in {
        "scorer": "was computed with other weights, tokenizer or pooling", "similarity": "is for another similarity",
        "docs": "holds other docs", "num_docs": "holds other docs", "format": "has files of another version",
    }.items():  # fmt: skip
        if getattr(stored, key) != getattr(description, key):
            raise CheckpointError(
                f"{folder}: {reason}: {key}: expected {getattr(description, key)!r}, got {getattr(stored, key)!r}; "
                "name another folder or delete it"
            )
    if stored != description:
        other = {key: value for key, value in asdict(stored).items() if value != getattr(description, key)}
        raise CheckpointError(
            f"{folder}: expected vectors of the same settings, got {other}; name another folder, delete it, "
            "or set these values"
        )


def read_description(folder: Path) -> Description:
    """Read the description of a folder of vectors.

    Raises:
        DataError: encoded.json is missing or can't be read.
    """
    try:
        return Description(**json.loads((folder / "encoded.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: expected a folder of vectors with a readable encoded.json, got {error}") from error


def shard_folder(folder: Path, number: int) -> Path:
    """Return the folder of a shard."""
    return folder / f"shard-{number:05d}"


def complete_shards(folder: Path, description: Description) -> list[Path]:
    """Return the folders of all shards, once their files equal their checksums.

    Raises:
        DataError: Shards are missing or damaged; the message names all missing ones.
    """
    shards = [shard_folder(folder, shard) for shard in range(description.num_shards)]
    missing = [shard.name for shard in shards if not (shard / "meta.json").is_file()]
    if missing:
        raise DataError(
            f"{folder}: expected {len(shards)} shards, {', '.join(missing)} missing; encode again, "
            "existing shards are kept"
        )
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(partial(verify_folder, fix=REBUILD), shards))
    if time.monotonic() - started > LOG_SECONDS:
        seconds = time.monotonic() - started
        log.info("%s: compared %d shards with their checksums in %.0f s", folder, len(shards), seconds)
    return shards


class ShardWriter:
    """Write the files of one shard; `vectors` can be filled in any order.

    Args:
        folder: An existing, empty folder.
        description: What the vectors are computed from.
        first: Row of the first doc in the collection.
        ids: UTF-8 ids [docs].
        counts: Number of vectors of each doc, int32 [docs].

    Attributes:
        vectors: The file of vectors, mapped for writing, [vectors, dim].
    """

    def __init__(self, folder: Path, description: Description, first: int, ids: np.ndarray, counts: np.ndarray) -> None:
        if description.several:
            (folder / "counts.bin").write_bytes(counts.astype("<i4").data)  # `tofile` hides the system's error
        (folder / "ids.bin").write_bytes(ids.data)
        num_vectors = int(counts.sum(dtype=np.int64))
        self._folder = folder
        self._meta = {"first": first, "docs": len(ids), "vectors": num_vectors, "id_bytes": ids.dtype.itemsize}
        path, shape = folder / "vectors.bin", (num_vectors, description.dim)
        reserve(path, num_vectors * description.dim * np.dtype(description.dtype).itemsize)
        self.vectors = np.memmap(path, description.dtype, "r+", shape=shape)

    def finish(self) -> None:
        """Write the vectors to disk, then meta.json, which marks the shard as complete."""
        self.vectors.flush()
        (self._folder / "meta.json").write_text(json.dumps(self._meta) + "\n", encoding="utf-8")


def _read_shard(folder: Path, number: int, description: Description) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return vectors [vectors, dim], memory-mapped; ids, UTF-8 bytes [docs]; counts, int64 [docs]."""
    num_docs = min(description.shard_docs, description.num_docs - number * description.shard_docs)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        vectors = map_array(folder / "vectors.bin", description.dtype).reshape(-1, description.dim)
        ids = np.fromfile(folder / "ids.bin", dtype=f"S{meta['id_bytes']}")
        if description.several:
            counts = np.fromfile(folder / "counts.bin", dtype="<i4").astype(np.int64)
        else:
            counts = np.ones(num_docs, dtype=np.int64)
        fits = len(ids) == len(counts) == meta["docs"] == num_docs and len(vectors) == counts.sum() == meta["vectors"]
        if not fits:
            raise ValueError(f"{len(ids)} ids, {len(counts)} counts and {len(vectors)} vectors for {num_docs} docs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: expected a whole shard, got {error}; {REBUILD.format(folder=folder)}") from error
    return vectors, ids, counts


class VectorStore:
    """Read a complete folder of vectors; only ids and counts are held in memory.

    Args:
        folder: The folder.

    Attributes:
        description: What the vectors were computed from.
        doc_ids: The id of each doc, UTF-8 in a fixed-width bytes array [docs].
        counts: Number of vectors of each doc, int64 [docs].
        ends: Cumulative counts, int64 [docs].

    Raises:
        DataError: Shards are missing or damaged; the message names all missing ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.description = folder, read_description(folder)
        shards = complete_shards(folder, self.description)
        self._vectors, ids, counts = [], [], []
        for number, shard in enumerate(shards):
            vectors, shard_ids, shard_counts = _read_shard(shard, number, self.description)
            self._vectors.append(vectors)
            ids.append(shard_ids)
            counts.append(shard_counts)
        self.doc_ids = np.concatenate(ids) if ids else np.array([], dtype="S1")
        self.counts = np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self._shard_ends = np.cumsum([len(part) for part in self._vectors])

    @property
    def num_docs(self) -> int:
        """Number of docs."""
        return len(self.counts)

    @property
    def num_vectors(self) -> int:
        """Number of vectors."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_bytes(self) -> int:
        """Size of the vectors on disk, in bytes."""
        return sum(part.nbytes for part in self._vectors)

    def chunks(self, max_vectors: int = 65536) -> Iterator[np.ndarray]:
        """Yield all vectors in order, float32 [vectors, dim], at most `max_vectors` at a time."""
        for part in self._vectors:
            for start in range(0, len(part), max_vectors):
                yield np.ascontiguousarray(part[start : start + max_vectors], dtype=np.float32)

    def between(self, first: int, end: int, max_vectors: int = 65536) -> Iterator[np.ndarray]:
        """Yield the vectors `first` to `end` in order, float32 [vectors, dim], at most `max_vectors` at a time."""
        starts = self._shard_ends - [len(part) for part in self._vectors]
        for part, start in zip(self._vectors, starts.tolist(), strict=True):
            for place in range(max(0, first - start), min(len(part), end - start), max_vectors):
                last = min(place + max_vectors, end - start)
                yield np.array(part[place:last], dtype=np.float32)

    def shard(self, number: int) -> tuple[np.ndarray, slice]:
        """Return the vectors of a shard, mapped [vectors, dim], and the rows of its docs."""
        first = number * self.description.shard_docs
        return self._vectors[number], slice(first, min(first + self.description.shard_docs, self.num_docs))

    def of_doc(self, row: int) -> np.ndarray:
        """Return the vectors of a doc by its row, mapped [vectors, dim]."""
        shard = row // self.description.shard_docs
        end = self.ends[row] - (self._shard_ends[shard - 1] if shard else 0)
        return self._vectors[shard][end - self.counts[row] : end]

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """Return `count` vectors (or all), drawn without replacement, float32 [vectors, dim]."""
        if count >= self.num_vectors:
            return np.concatenate([np.zeros((0, self.description.dim), dtype=np.float32), *self.chunks()])
        return self.vectors_at(np.sort(np.random.default_rng(seed).choice(self.num_vectors, count, replace=False)))

    def take(self, rows: np.ndarray) -> TextVectors:
        """Return the vectors of docs by their rows, int64 [docs], in that order."""
        counts = self.counts[rows]
        values = torch.from_numpy(self.vectors_at(ranges(self.ends[rows] - counts, counts)))
        return TextVectors(values, torch.from_numpy(counts) if self.description.several else None)

    def vectors_at(self, indices: np.ndarray) -> np.ndarray:
        """Return vectors by their indices over all shards, int64 [vectors]; float32 [vectors, dim]."""
        out = np.empty((len(indices), self.description.dim), dtype=np.float32)
        shards = np.searchsorted(self._shard_ends, indices, side="right")
        for shard in np.unique(shards):
            in_shard = shards == shard
            start = self._shard_ends[shard - 1] if shard else 0
            out[in_shard] = self._vectors[shard][indices[in_shard] - start]
        return out
