"""Exhaustive search: exact, in time proportional to the size of the collection."""

from __future__ import annotations

from typing import Any

import torch

from ranker.errors import ConfigError
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.tensor_index import TensorIndex
from ranker.retrieval.vector_store import VectorStore

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Flat:
    """Inner products with all vectors: by faiss on a CPU, by torch on GPUs.

    Args:
        gpu: Whether to search on all GPUs; None: yes if there is one.
        dtype: Type in which a GPU searches: `bfloat16` or `float32`; the best are compared in double precision.
    """

    exact = True
    rescore = 1

    def __init__(self, gpu: bool | None = None, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"index.dtype: expected bfloat16 or float32, got {dtype!r}")
        if gpu and not torch.cuda.is_available():
            raise ConfigError("index.gpu: expected a GPU, got none; set index.gpu=null")
        self.gpu, self.dtype = gpu, dtype

    def over(self, store: VectorStore) -> Any:
        """Open the vectors on all GPUs, or on the CPU.

        Raises:
            DataError: A vector is not finite.
        """
        if self.gpu is False or not torch.cuda.is_available():
            return VectorIndex.over(store, self)
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        return TensorIndex(store, self, devices, DTYPES[self.dtype])

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - signature of IndexType
        """Return a faiss index."""
        import faiss

        return faiss.IndexFlatIP(dim)

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """Return 0: it needs no training."""
        return 0
