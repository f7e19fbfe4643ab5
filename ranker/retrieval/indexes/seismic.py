"""Approximate search over term weights by Seismic (Bruch et al., 2024, arXiv:2404.18812), for large collections."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ranker.errors import ConfigError
from ranker.retrieval.impact_store import ImpactStore


class Seismic:
    """Searches blocks of each word's postings whose summary of weights is high; found docs are rescored exactly.

    The index is built each time that it is opened.

    Args:
        postings: Postings per word, on average; the largest weights are kept.
        query_terms: Words of a query that are searched, those of the largest weights.
        heap_factor: Blocks are skipped unless their summary reaches this factor times the score of the worst result;
            lower values find more.
        rescore: This many times the requested number of docs are rescored.
    """

    terms = True
    exact = False
    gpu = None

    def __init__(self, postings: int = 3500, query_terms: int = 10, heap_factor: float = 0.8, rescore: int = 2) -> None:
        for key, value in (("postings", postings), ("query_terms", query_terms), ("rescore", rescore)):
            if value < 1:
                raise ConfigError(f"index.{key}: expected at least 1, got {value}")
        if not 0 < heap_factor <= 1:
            raise ConfigError(f"index.heap_factor: expected above 0 and at most 1, got {heap_factor}")
        self.postings, self.query_terms, self.heap_factor, self.rescore = postings, query_terms, heap_factor, rescore

    def over(self, store: ImpactStore) -> Any:
        """Build the index over stored weights.

        Raises:
            ConfigError: The package is not installed.
        """
        try:
            from seismic import SeismicDataset, SeismicIndex, get_seismic_string
        except ImportError as error:
            raise ConfigError(
                "index: expected the package pyseismic-lsr, got none; install it with: pip install -e '.[seismic]'"
            ) from error
        text = get_seismic_string()
        names = np.arange(store.description.dim).astype(text)
        dataset, matrix = SeismicDataset(), store.matrix
        if not matrix.nnz:
            raise ConfigError("index: expected docs with terms for seismic, got none; set index=sparse")
        for row in range(store.num_docs):
            part = slice(matrix.indptr[row], matrix.indptr[row + 1])
            dataset.add_document(str(row), names[matrix.indices[part]], matrix.data[part])
        with tempfile.TemporaryDirectory() as folder, _without_output():
            index = SeismicIndex.build_from_dataset(dataset, n_postings=self.postings, num_threads=1)
            index.save(str(Path(folder) / "index"))
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        return _Index(index, self, names, size)


@contextmanager
def _without_output() -> Iterator[None]:
    """Drop what the package's library writes to the process's standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _Index:
    """A built index.

    Args:
        index: The package's index.
        options: Its options.
        names: The name of each word in the index.
        num_bytes: Size of the index.
    """

    exact = False

    def __init__(self, index: Any, options: Seismic, names: np.ndarray, num_bytes: int) -> None:
        self._index, self._options, self._names, self.num_bytes = index, options, names, num_bytes

    def rows(self, words: np.ndarray, weights: np.ndarray, depth: int) -> np.ndarray:
        """Return rows of docs for a query, int64 [docs], about the best `depth` times `rescore`.

        Args:
            words: Words of the query [words].
            weights: Their weights [words].
            depth: Docs that are wanted.
        """
        found = self._index.search(
            query_id="",
            query_components=self._names[words],
            query_values=weights.astype(np.float32),
            k=depth * self._options.rescore,
            query_cut=self._options.query_terms,
            heap_factor=self._options.heap_factor,
        )
        return np.array(sorted({int(doc_id) for _, _, doc_id in found}), dtype=np.int64)
