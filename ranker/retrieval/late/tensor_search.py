"""Search of a compressed index with torch: on a GPU, and on a CPU if numba is not installed.

The steps are those of PLAID (Santhanam et al., 2022b, arXiv:2205.09707).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import tensor_ranges
from ranker.interactions.maxsim import TextVectors, maxsim_chosen
from ranker.retrieval.late.arrays import Arrays, Effort
from ranker.retrieval.vector_store import VectorStore

SIMILARITIES = 2**28  # largest number of similarities in memory at a time


class TensorSearch:
    """Finds candidates by the similarities of centroids, then by decompressed vectors.

    Args:
        arrays: The index.
        device: Device of the index and of the search.
    """

    def __init__(self, arrays: Arrays, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.centroids = arrays.centroids.values.to(self.device)
        self.buckets = arrays.buckets.to(self.device)
        self.codes = self._moved(arrays.codes.astype(np.int32))
        self.residuals, self.entries, self.starts = map(self._moved, (arrays.residuals, arrays.entries, arrays.starts))
        ends = self._moved(arrays.ends)
        self.counts = ends.diff(prepend=ends.new_zeros(1))
        self.firsts = ends - self.counts
        self.stored: Tensor | None = None

    def _moved(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device)

    def candidates(self, queries: TextVectors, effort: Effort) -> list[np.ndarray]:
        """Return each query's candidates, rows of docs to score exactly, int64 [at most effort.rescore].

        Args:
            queries: Vectors of the queries, float32, on any device.
            effort: How many centroids and docs are compared.
        """
        grid, mask = queries.to(self.device).padded()
        found: list[np.ndarray] = []
        for query, real in zip(grid, mask, strict=True):
            tokens = query[real]
            rows = self._near(tokens, effort)
            if len(rows) > effort.rescore:
                rows = rows[self.decompressed(tokens, rows).topk(effort.rescore).indices]
            found.append(rows.cpu().numpy())
        return found

    def _near(self, query: Tensor, effort: Effort) -> Tensor:
        """Return the rows of the docs with the best MaxSim of probed centroids, int64 [docs].

        The similarity of a token with a doc is at least that of the token's worst probed centroid.

        Args:
            query: [tokens, dim].
            effort: How many centroids and docs are compared.
        """
        similarities = self.centroids @ query.T  # [centroids, tokens]
        lowest = similarities.topk(min(effort.probes, len(similarities)), dim=0).values[-1]
        probed = (similarities >= lowest).any(1).nonzero().squeeze(1)
        sizes = self.starts[probed + 1] - self.starts[probed]
        docs = self.entries[tensor_ranges(self.starts[probed], sizes, int(sizes.sum()))].long()
        rows, slots = docs.unique(return_inverse=True)
        if len(rows) <= effort.candidates:
            return rows
        best = lowest.repeat(len(rows), 1)
        for some, own in zip(
            slots.split(max(1, SIMILARITIES // len(query))),
            probed.repeat_interleave(sizes).split(max(1, SIMILARITIES // len(query))),
            strict=True,
        ):
            best.scatter_reduce_(0, some.unsqueeze(1).expand(-1, len(query)), similarities[own], "amax")
        return rows[best.sum(1).topk(effort.candidates).indices]

    def decompressed(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return the MaxSim of a query with the decompressed vectors of docs, float32 [docs].

        Args:
            query: [tokens, dim].
            rows: Rows of the docs, int64 [docs]; a doc without vectors has the score -inf.
        """
        counts = self.counts[rows]
        best = torch.full((len(rows), len(query)), -torch.inf, device=self.device)
        owners = torch.arange(len(rows), device=self.device).repeat_interleave(counts)
        vectors = tensor_ranges(self.firsts[rows], counts, len(owners))
        block = max(1, SIMILARITIES // max(len(query), query.shape[1]) // 4)
        for some, own in zip(vectors.split(block), owners.split(block), strict=True):
            values = self.centroids[self.codes[some]] + self.buckets.unpack(self.residuals[some], query.shape[1])
            best.scatter_reduce_(0, own.unsqueeze(1).expand(-1, len(query)), values @ query.T, "amax")
        return best.sum(1)

    def load(self, store: VectorStore, room: int | None = None) -> None:
        """Copy the stored vectors to the device, if they fit, for `exhaustive` and `exact`.

        Args:
            store: The vectors of the index's docs, in the same order.
            room: Bytes that they may take; None: half of a GPU's free memory, 0 on a CPU.
        """
        if room is None:
            room = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else 0
        if store.num_vectors * store.description.dim * 4 <= room:
            self.stored = torch.empty(store.num_vectors, store.description.dim, device=self.device)
            done = 0
            for chunk in store.chunks():
                self.stored[done : done + len(chunk)] = torch.tensor(chunk, device=self.device)
                done += len(chunk)

    def exhaustive(self, queries: TextVectors, present: np.ndarray, count: int) -> list[np.ndarray]:
        """Return the rows of the docs with the best exact scores of each query, int64 [at most count].

        Args:
            queries: Vectors of the queries, float32, on any device.
            present: Rows of the docs that are not deleted, int64 [docs].
            count: Number of docs per query.
        """
        rows = torch.from_numpy(present).to(self.device)
        scores = self._scores(queries, [rows] * queries.num_texts).view(queries.num_texts, -1)
        best = scores.topk(min(count, len(present)), dim=1).indices
        return list(rows[best].cpu().numpy())

    def exact(self, queries: TextVectors, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Return the MaxSim of each query with the stored vectors of its docs, float32 [docs].

        Args:
            queries: Vectors of the queries, float32, on any device.
            rows: Rows of the docs of each query, int64 [docs].
        """
        scores = self._scores(queries, [torch.from_numpy(some).to(self.device) for some in rows]).cpu().numpy()
        return np.split(scores, np.cumsum([len(some) for some in rows])[:-1])

    def _scores(self, queries: TextVectors, rows: list[Tensor]) -> Tensor:
        """Return the scores of each query's docs, one query after another, float32 [docs of all queries]."""
        assert self.stored is not None
        on_device = queries.to(self.device)
        owners = torch.arange(len(rows), device=self.device).repeat_interleave(
            torch.tensor([len(some) for some in rows], device=self.device)
        )
        docs = TextVectors(self.stored, self.counts)
        return maxsim_chosen(on_device, docs, owners, torch.cat(rows))
