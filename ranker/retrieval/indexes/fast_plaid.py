"""LightOn's fast-plaid (extra `fast_plaid`), for comparison; PLAID in Rust (arXiv:2205.09707)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranker.errors import ConfigError
from ranker.retrieval.index_type import require
from ranker.retrieval.indexes._external import ExternalIndex, doc_tensors, open_or_build, pick_device
from ranker.retrieval.vector_store import VectorStore


class FastPlaid:
    """Search by fast-plaid; it builds its index from all vectors in memory.

    Args:
        bits: Bits per dimension of a residual.
        probes: Centroids that are searched for each token of a query.
        full_scores: Docs that are compared by decompressed vectors.
        rescore: This many times the requested number of docs are scored exactly; 0: the program's own scores are final.
        gpu: Whether to use a GPU; None: yes if there is one.
    """

    late = True
    exact = False

    def __init__(
        self, bits: int = 4, probes: int = 8, full_scores: int = 4096, rescore: int = 0, gpu: bool | None = None
    ) -> None:
        for key, value in (("bits", bits), ("probes", probes), ("full_scores", full_scores)):
            require(f"index.{key}", value)
        if rescore < 0:
            raise ConfigError(f"index.rescore: expected at least 0, got {rescore}")
        self.bits, self.probes, self.full_scores, self.rescore, self.gpu = bits, probes, full_scores, rescore, gpu

    def over(self, store: VectorStore) -> Any:
        """Open the index that is stored beside the vectors, or build it.

        Raises:
            ConfigError: The package is not installed.
            CheckpointError: The stored index is of other vectors.
        """
        try:
            from fast_plaid import search
        except ImportError as error:
            raise ConfigError(
                "index: expected the package fast-plaid, got none; install it with: pip install -e '.[fast_plaid]' "
                "(it needs torch 2.11)"
            ) from error
        device = pick_device(self.gpu)

        def build(folder: Path) -> None:
            search.FastPlaid(str(folder), device=device).create(doc_tensors(store), nbits=self.bits)

        folder = open_or_build(store, "fast_plaid", {"bits": self.bits}, build)
        engine = search.FastPlaid(str(folder), device=device)

        def find(queries: list[Any], count: int) -> Any:
            return engine.search(
                queries,
                top_k=count,
                n_full_scores=max(self.full_scores, count),
                n_ivf_probe=self.probes,
                show_progress=False,
            )

        return ExternalIndex(folder, find, self.rescore, store)
