"""An inverted index over term weights: for each word, all docs that have it. Searches are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from ranker.data.ragged import ranges
from ranker.errors import DataError
from ranker.files.checksums import REBUILD, verify_folder
from ranker.files.folders import write_folder

if TYPE_CHECKING:  # the first stages use the class without torch, which a store imports
    from ranker.retrieval.impact_store import ImpactStore

LEVELS = 255  # levels above 0 of a weight in 8 bits
FORMAT = 1  # raise it when the files change
ARRAYS = ("starts", "rows", "impacts")


class Postings:
    """Postings of all words; word w has the entries `starts[w]` to `starts[w + 1]` of `rows` and `impacts`.

    Args:
        starts: int64 [words + 1].
        rows: Row of the doc, ascending for each word, int32 [entries].
        impacts: The doc's weight for the word, float32; or uint8, a multiple of `scale` [entries].
        scale: Factor that turns impacts into weights.
        num_docs: Number of docs.
    """

    exact = True

    def __init__(self, starts: np.ndarray, rows: np.ndarray, impacts: np.ndarray, scale: float, num_docs: int) -> None:
        self.starts, self.rows, self.impacts, self.scale, self.num_docs = starts, rows, impacts, scale, num_docs

    @property
    def num_bytes(self) -> int:
        """Size of the index in bytes."""
        return self.starts.nbytes + self.rows.nbytes + self.impacts.nbytes

    @classmethod
    def of(cls, matrix: Any, quantized: bool) -> Postings:
        """Return the postings of weights, a scipy matrix [docs, words].

        Args:
            matrix: The weights, at least 0.
            quantized: Whether to round each weight to one of 256 levels between 0 and the largest weight.
        """
        columns = matrix.tocsc()
        impacts, scale = columns.data.astype(np.float32), 1.0
        if quantized:
            scale = float(impacts.max(initial=0.0)) / LEVELS or 1.0
            impacts = np.rint(impacts / scale).astype(np.uint8)
        return cls(columns.indptr.astype(np.int64), columns.indices.astype(np.int32), impacts, scale, matrix.shape[0])

    @classmethod
    def over(cls, store: ImpactStore, quantized: bool) -> Postings:
        """Open the index that is stored beside the weights, or build and store it.

        Raises:
            DataError: The stored index is damaged, or was built over other weights.
        """
        folder = store.folder / f"index-sparse-{'8bit' if quantized else 'float'}"
        expected = {"vectors": store.description.digest, "docs": store.num_docs, "format": FORMAT}
        with FileLock(store.folder / f".{folder.name}.lock"):
            if folder.is_dir():
                return cls._read(folder, expected, store.matrix.nnz)
            built = cls.of(store.matrix, quantized)
            with write_folder(folder) as partial:
                for name in ARRAYS:
                    np.save(partial / f"{name}.npy", getattr(built, name), allow_pickle=False)
                meta = {**expected, "scale": built.scale}
                (partial / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
        return built

    @classmethod
    def _read(cls, folder: Path, expected: dict[str, Any], entries: int) -> Postings:
        verify_folder(folder, fix=REBUILD)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            scale = float(meta.pop("scale"))
            arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS]
            if meta != expected or len(arrays[1]) != entries or len(arrays[2]) != entries:
                raise ValueError(f"one of {meta} with {len(arrays[1])} entries for {expected} with {entries}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{folder}: expected an index of the weights beside it, got {error}; {REBUILD.format(folder=folder)}"
            ) from error
        return cls(arrays[0], arrays[1], arrays[2], scale, expected["docs"])

    def scores(self, words: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the score of each doc, float32 [docs].

        Products are added in float64 in the order of the words, so that docs with equal weights have equal scores.

        Args:
            words: Words of the query, ascending [words].
            weights: Their weights [words].
        """
        counts = self.starts[words + 1] - self.starts[words]
        entries = ranges(self.starts[words], counts)
        products = self.impacts[entries].astype(np.float64) * np.repeat(weights.astype(np.float64), counts)
        sums = np.bincount(self.rows[entries], products, minlength=self.num_docs)
        return (sums * self.scale).astype(np.float32)
