"""Write and read the vectors of a collection, in the folders of `ranker.retrieval.vector_folder`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ranker.data.ragged import ranges
from ranker.data.token_writer import map_array
from ranker.errors import DataError
from ranker.files.checksums import REBUILD
from ranker.files.space import reserve
from ranker.interactions.maxsim import TextVectors
from ranker.retrieval.vector_folder import Description, complete_shards, read_description


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
