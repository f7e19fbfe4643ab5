"""xtr-warp-rs (extra `warp`), for comparison; WARP in Rust (arXiv:2501.17788)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ranker.errors import ConfigError
from ranker.retrieval.index_type import require
from ranker.retrieval.indexes._external import ExternalIndex, doc_tensors, open_or_build, pick_device
from ranker.retrieval.vector_store import VectorStore


class Warp:
    """Search by xtr-warp-rs; it builds its index from all vectors in memory.

    Args:
        bits: Bits per dimension of a residual.
        probes: Centroids that are searched for each token of a query; None: the program's choice.
        rescore: This many times the requested number of docs are scored exactly; 0: the program's own scores are final.
        gpu: Whether to use a GPU; None: yes if there is one.
    """

    late = True
    exact = False

    def __init__(self, bits: int = 4, probes: int | None = None, rescore: int = 0, gpu: bool | None = None) -> None:
        require("index.bits", bits)
        if rescore < 0:
            raise ConfigError(f"index.rescore: expected at least 0, got {rescore}")
        self.bits, self.probes, self.rescore, self.gpu = bits, require("index.probes", probes), rescore, gpu

    def over(self, store: VectorStore) -> Any:
        """Open the index that is stored beside the vectors, or build it.

        Raises:
            ConfigError: The package is not installed.
            CheckpointError: The stored index is of other vectors.
        """
        try:
            from xtr_warp.search import XTRWarp
        except ImportError as error:
            raise ConfigError(
                "index: expected the package xtr-warp-rs, got none; install it with: pip install -e '.[warp]' "
                "(it needs torch 2.11)"
            ) from error
        device = pick_device(self.gpu)

        def build(folder: Path) -> None:
            XTRWarp(str(folder)).create(doc_tensors(store), device=device, nbits=self.bits, show_progress=False)

        folder = open_or_build(store, "warp", {"bits": self.bits}, build)
        engine = XTRWarp(str(folder)).load(device=device)

        def find(queries: list[Any], count: int) -> Any:
            threads = torch.get_num_threads()
            return engine.search(queries, top_k=count, num_threads=threads, nprobe=self.probes, show_progress=False)

        return ExternalIndex(folder, find, self.rescore, store)
