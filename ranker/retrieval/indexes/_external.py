"""An index of another program over stored token vectors, with the interface of `LateIndex`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranker.errors import CheckpointError
from ranker.files.writing import write_whole
from ranker.interactions.maxsim import TextVectors
from ranker.retrieval.late.exact import exact_scores, query_vectors
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

Found = list[list[tuple[int, float]]]  # rows of docs with their scores, of each query


class ExternalIndex:
    """Searches the index of another program.

    Args:
        folder: Folder of the index's files.
        search: Function of the vectors of queries, each [tokens, dim], and a number of docs; returns the best docs.
        rescore: This many times the requested number of docs are scored exactly; 0: the program's scores are final.
        store: The vectors.
    """

    exact = False

    def __init__(
        self, folder: Path, search: Callable[[list[torch.Tensor], int], Found], rescore: int, store: VectorStore
    ) -> None:
        self._search, self._rescore, self._store, self.stages = search, rescore, store, Stages()
        self.num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def rank(self, queries: TextVectors, depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return rows of docs, int64 [docs], and their scores, float32 [docs], for each query, unsorted."""
        texts, count = query_vectors(queries), min(self._store.num_docs, depth * max(1, self._rescore))
        with self.stages("candidates"):
            found = self._search([torch.from_numpy(text) for text in texts], count)
        rows = [np.array([row for row, _ in some], dtype=np.int64) for some in found]
        if not self._rescore:
            scores = [np.array([score for _, score in some], dtype=np.float32) for some in found]
            return list(zip(rows, scores, strict=True))
        with self.stages("exact"):
            return [
                (some, exact_scores(text, some, self._store.of_doc)) for text, some in zip(texts, rows, strict=True)
            ]


def open_or_build(store: VectorStore, name: str, options: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """Return the folder of a program's index; build it if it is missing or incomplete.

    Args:
        store: The vectors.
        name: Name of the program.
        options: Options on which the index depends, besides the vectors.
        build: Writes the index into a folder.

    Raises:
        CheckpointError: The folder has an index of other vectors or options.
    """
    folder = store.folder / f"index-{name}-{'-'.join(map(str, options.values()))}"
    expected, path = {"vectors": store.description.digest, **options}, folder.with_suffix(".json")
    if not path.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        build(folder)
        with write_whole(path) as file:
            file.write(json.dumps(expected) + "\n")
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored != expected:
        raise CheckpointError(f"{folder}: expected an index of {expected}, got one of {stored}; delete it and {path}")
    return folder


def doc_tensors(store: VectorStore) -> list[torch.Tensor]:
    """Load the vectors of each doc into memory, float32 [vectors, dim], as these programs need them."""
    return [torch.from_numpy(np.array(store.of_doc(row), dtype=np.float32)) for row in range(store.num_docs)]


def pick_device(gpu: bool | None) -> str:
    """Return `cuda` if `gpu` is true, or None and there is a GPU; else `cpu`."""
    return "cuda" if gpu or (gpu is None and torch.cuda.is_available()) else "cpu"
