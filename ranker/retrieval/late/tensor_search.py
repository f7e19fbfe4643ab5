"""Search of a compressed index with torch: on a GPU, and on a CPU if numba is not installed.

On a GPU, all queries of a batch are searched at once. The steps are those of PLAID (Santhanam et al., 2022b,
arXiv:2205.09707), but without inverted lists: a kernel scores all docs by their centroids.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import tensor_ranges
from ranker.interactions.maxsim import TextVectors, maxsim_all, maxsim_chosen, maxsim_pairs
from ranker.retrieval.late.arrays import Arrays, Effort
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

SIMILARITIES = 2**28  # largest number of similarities in memory at a time
LEVELS = 255  # of a similarity in the tables of `code_scores`

Ranked = tuple[np.ndarray, np.ndarray]  # rows of docs, int64 [docs], and their scores, float32 [docs]


class TensorSearch:
    """Finds candidates by the similarities of centroids, then by vectors: stored ones on the device, or decompressed.

    Args:
        arrays: The index.
        device: Device of the index and of the search.

    Attributes:
        stored: The stored vectors on the device, in their own type; None: see `load`.
    """

    def __init__(self, arrays: Arrays, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.centroids = arrays.centroids.values.to(self.device)
        self.buckets = arrays.buckets.to(self.device)
        self.codes = self._moved(arrays.codes.astype(np.int32))
        self.residuals = self._moved(arrays.residuals)
        self.scales = self._moved(arrays.scales.astype(np.float32))
        self.docs = self._moved(np.concatenate([[0], arrays.ends]))  # int64 [docs + 1]
        self.counts = self.docs.diff()
        self.longest = int(self.counts.max()) if len(self.counts) else 0
        self.by_kernel = self.device.type == "cuda" and find_spec("triton") is not None
        if not self.by_kernel:
            self.entries, self.starts = self._moved(arrays.entries), self._moved(arrays.starts)
        self.stored: TextVectors | None = None
        self._short: TextVectors | None = None  # the stored vectors in 16 bits

    def _moved(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device)

    def load(self, store: VectorStore, room: int | None = None) -> None:
        """Copy the stored vectors to the device, if they fit, for `rank`; vectors of 32 bits in 16 bits, too.

        Args:
            store: The vectors of the index's docs, in the same order.
            room: Bytes that they may take; None: half of a GPU's free memory, 0 on a CPU or without Triton.
        """
        if room is None:
            room = torch.cuda.mem_get_info(self.device)[0] // 2 if self.by_kernel else 0
        description = store.description
        shape, half = (store.num_vectors, description.dim), description.dtype == "float16"
        if shape[0] * shape[1] * (2 if half else 6) > room:
            return
        stored = torch.empty(shape, dtype=torch.float16 if half else torch.float32, device=self.device)
        # vectors of length 1 need no more range than float16 has
        dtype = torch.float16 if description.similarity == "cosine" else torch.bfloat16
        short = stored if half else torch.empty(shape, dtype=dtype, device=self.device)
        done = 0
        for chunk in store.chunks():
            some = slice(done, done + len(chunk))
            stored[some] = torch.tensor(chunk, device=self.device)
            short[some] = stored[some]
            done += len(chunk)
        self.stored, self._short = (TextVectors(values, self.counts, self.longest) for values in (stored, short))

    def rank(
        self, queries: TextVectors, present: np.ndarray, effort: Effort, exhaustive: bool, stages: Stages
    ) -> list[Ranked]:
        """Return each query's candidates with exact scores from the stored vectors. The host waits twice per block.

        Args:
            queries: Vectors of the queries, float32, in main memory.
            present: Rows of the docs that are not deleted, int64 [docs].
            effort: How many centroids and docs are compared.
            exhaustive: Whether all docs are compared by their vectors in 16 bits, and not first by their centroids.
            stages: Where to add the seconds.
        """
        assert self.stored is not None
        ranked: list[Ranked] = []
        for some in self._blocks(queries):
            with stages("candidates"):
                block = queries.take(some).to(self.device)
                rows = self._best_rows(block, present, effort, exhaustive)
                rows_here = rows.cpu().numpy()
            with stages("exact"):
                scores = self._chosen(block, self.stored, rows).cpu().numpy()
            ranked += zip(rows_here, scores, strict=True)
        return ranked

    def _blocks(self, queries: TextVectors) -> tuple[Tensor, ...]:
        """Split the queries such that tables and scores of a block have at most `SIMILARITIES` numbers."""
        size = max(len(self.centroids) * _power_of_two(queries.bound()), len(self.counts), 1)
        return torch.arange(queries.num_texts).split(max(1, SIMILARITIES // size))

    def _best_rows(self, queries: TextVectors, present: np.ndarray, effort: Effort, exhaustive: bool) -> Tensor:
        """Return the docs to score exactly, best first, int64 [queries, at most effort.rescore]."""
        assert self._short is not None
        short = TextVectors(queries.values.to(self._short.values.dtype), queries.counts, queries.longest)
        if exhaustive:
            scores = self._present(maxsim_all(short, self._short), present)
            return scores.topk(min(int(effort.rescore), len(present))).indices
        rows = self._by_codes(queries, present, effort.candidates)
        best = self._chosen(short, self._short, rows).topk(min(int(effort.rescore), rows.shape[1])).indices
        return rows.gather(1, best)

    def _present(self, scores: Tensor, present: np.ndarray) -> Tensor:
        """Return scores [queries, docs], in which deleted docs have the lowest possible score."""
        if len(present) == scores.shape[1]:
            return scores
        lowest = -1 if scores.dtype == torch.int32 else -torch.inf
        kept = torch.zeros(scores.shape[1], dtype=torch.bool, device=self.device)
        kept[torch.from_numpy(present).to(self.device)] = True
        return scores.masked_fill(~kept, lowest)

    def _chosen(self, queries: TextVectors, docs: TextVectors, rows: Tensor) -> Tensor:
        """Return the MaxSim of each query with its docs, float32 [queries, docs per query], for such rows."""
        owners = torch.arange(len(rows), device=self.device).repeat_interleave(rows.shape[1])
        return maxsim_chosen(queries, docs, owners, rows.flatten()).view(rows.shape)

    def _by_codes(self, queries: TextVectors, present: np.ndarray, count: int) -> Tensor:
        """Return the docs with the best MaxSim of their centroids, int64 [queries, at most count]."""
        from ranker.interactions.kernels.code_scores import code_scores  # needs Triton

        scores = code_scores(self.table(queries), self.codes, self.docs)
        return self._present(scores, present).topk(min(count, len(present))).indices

    def table(self, queries: TextVectors) -> Tensor:
        """Return the scaled similarities of the centroids, uint8 [queries, centroids, tokens, a power of two].

        Each token's lowest similarity is subtracted first, which changes all docs' scores of a query by the same
        constant. The scale is the same for all tokens of a query.
        """
        grid = self._grid(queries)
        similarities = self.centroids @ grid.transpose(1, 2)  # [queries, centroids, tokens]
        similarities -= similarities.amin(1, keepdim=True)
        span = similarities.amax((1, 2), keepdim=True).clamp(min=1e-20)
        return similarities.mul_(LEVELS / span).round_().to(torch.uint8)

    def _grid(self, queries: TextVectors) -> Tensor:
        """Return the vectors of the queries, padded with zeros without a wait, [queries, tokens, dim]."""
        assert queries.counts is not None
        width = _power_of_two(queries.bound())
        owners = torch.arange(queries.num_texts, device=self.device).repeat_interleave(
            queries.counts, output_size=len(queries.values)
        )
        places = torch.arange(len(queries.values), device=self.device) - queries.starts[owners]
        grid = queries.values.new_zeros(queries.num_texts, width, queries.values.shape[1])
        return grid.index_put((owners, places), queries.values)

    def candidates(self, queries: TextVectors, present: np.ndarray, effort: Effort) -> list[np.ndarray]:
        """Return each query's candidates by decompressed vectors, int64 [at most effort.rescore].

        Args:
            queries: Vectors of the queries, float32, in main memory.
            present: Rows of the docs that are not deleted, int64 [docs].
            effort: How many centroids and docs are compared.
        """
        found: list[np.ndarray] = []
        for some in self._blocks(queries):
            block = queries.take(some).to(self.device)
            if self.by_kernel:
                rows = self._by_codes(block, present, effort.candidates)
                if rows.shape[1] > int(effort.rescore):
                    owners = torch.arange(len(rows), device=self.device).repeat_interleave(rows.shape[1])
                    scores = self.decompressed(block, owners, rows.flatten()).view(rows.shape)
                    rows = rows.gather(1, scores.topk(int(effort.rescore)).indices)
                found.extend(rows.cpu().numpy())
                continue
            for number, query in enumerate(_split(block)):
                rows = self._near(query, effort)
                if len(rows) > int(effort.rescore):
                    scores = self.decompressed(block, torch.full_like(rows, number), rows)
                    rows = rows[scores.topk(int(effort.rescore)).indices]
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

    def decompressed(self, queries: TextVectors, owners: Tensor, rows: Tensor) -> Tensor:
        """Return the MaxSim of pairs of a query and a doc's decompressed vectors, float32 [pairs].

        Args:
            queries: Vectors of the queries, on the device.
            owners: The query of each pair, int64 [pairs].
            rows: Row of the doc of each pair, int64 [pairs]; a doc without vectors has the score -inf.
        """
        dim = queries.values.shape[1]
        scores: list[Tensor] = []
        block = max(1, SIMILARITIES // max(1, 8 * dim * self.longest))
        for own, some in zip(owners.split(block), rows.split(block), strict=True):
            counts = self.counts[some]
            vectors = tensor_ranges(self.docs[some], counts, int(counts.sum()))
            values = self.centroids[self.codes[vectors]] + self.buckets.unpack(self.residuals[vectors], dim)
            values *= self.scales[vectors].unsqueeze(1)
            scores.append(maxsim_pairs(queries, TextVectors(values, counts, self.longest), own))
        return torch.cat(scores) if scores else torch.zeros(0, device=self.device)


def _split(queries: TextVectors) -> tuple[Tensor, ...]:
    assert queries.counts is not None
    return queries.values.split(queries.counts.tolist())


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
