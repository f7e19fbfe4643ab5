"""Stored vectors, cut to their first dimensions without encoding the docs again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ranker.retrieval.vector_store import VectorStore


class Shortened(VectorStore):
    """The first `dim` dimensions of each stored vector; for cosine similarity scaled to length 1 again.

    Args:
        store: The vectors of full size, one per doc.
        dim: Number of dimensions to keep.

    Attributes:
        folder: A folder inside the store's, for indexes over these vectors.
    """

    def __init__(self, store: VectorStore, dim: int) -> None:
        self._whole, self._dim = store, dim
        self.folder = store.folder / f"dim-{dim}"
        self.folder.mkdir(exist_ok=True)
        self.description = replace(store.description, dim=dim)
        self.doc_ids, self.counts, self.ends = store.doc_ids, store.counts, store.ends

    @property
    def num_bytes(self) -> int:
        """Size in bytes that these vectors would have on disk."""
        return self.num_vectors * self._dim * np.dtype(self.description.dtype).itemsize

    def chunks(self, max_vectors: int = 65536) -> Iterator[np.ndarray]:
        """Yield all vectors in order, float32 [vectors, dim], at most `max_vectors` at a time."""
        return (self._cut(chunk) for chunk in self._whole.chunks(max_vectors))

    def between(self, first: int, end: int, max_vectors: int = 65536) -> Iterator[np.ndarray]:
        """Yield the vectors `first` to `end` in order, float32 [vectors, dim], at most `max_vectors` at a time."""
        return (self._cut(chunk) for chunk in self._whole.between(first, end, max_vectors))

    def vectors_at(self, indices: np.ndarray) -> np.ndarray:
        """Return vectors by their indices, int64 [vectors]; float32 [vectors, dim]."""
        return self._cut(self._whole.vectors_at(indices))

    def _cut(self, vectors: np.ndarray) -> np.ndarray:
        short = np.ascontiguousarray(vectors[:, : self._dim])
        if self.description.similarity != "cosine":
            return short
        lengths = np.linalg.norm(short, axis=1, keepdims=True)
        return short / np.maximum(lengths, 1e-12)
