"""Exact search with torch, over blocks of vectors, on one or several GPUs or on the CPU.

First, inner products in bfloat16 or float32 select the vectors that may be among the best. Then `VectorEngine` compares
these in double precision, so that ranking and ties are those of an exact search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranker.retrieval.index import refuse_not_finite
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

GROUP = 16  # size of the groups of vectors in `_promising`
PRODUCTS = 2**29  # largest number of inner products in memory at a time
PRODUCTS_ON_GPU = 2**30  # the same on a GPU with `FREE_MEMORY` bytes of free memory
FREE_MEMORY = 2**34
EXACT_NUMBERS = 2**25  # largest number of vector elements in memory at a time in `exact`
SHARE_OF_MEMORY = 0.7  # share of a GPU's free memory that vectors may take
# Largest error of an inner product of two vectors of length 1. Bfloat16 has 8 significant bits: both factors and the
# result are rounded by at most 2**-9 of their size. The error of float32, with sums in any order, is far smaller.
ERRORS = {torch.bfloat16: 3 * 2.0**-9, torch.float32: 1e-5}
FETCHED = {torch.bfloat16: 4, torch.float32: 1}  # number of selected vectors, as a multiple of the requested number


@dataclass
class _Part:
    """Consecutive vectors on one device.

    Args:
        device: The device.
        first: Index of the first vector.
        count: Number of vectors.
        values: The vectors in the number type in which the search multiplies them (`dtype` of the index), [vectors,
            dim]; None: each search reads them from the disk.
        exact: The vectors in float32, [vectors, dim]; None: each search reads those that it needs from the disk.
    """

    device: torch.device
    first: int
    count: int
    values: Tensor | None = None
    exact: Tensor | None = None


class TensorIndex:
    """All vectors of a store, split over devices. If vectors do not fit, each search reads them from the disk.

    Args:
        store: The vectors.
        index_type: Type and options of the index.
        devices: Devices of the search.
        dtype: Number type in which the search multiplies vectors ("type of the search").
        room: Bytes that vectors may take on each device; None: `SHARE_OF_MEMORY` of a GPU's free memory, any on a CPU.

    Attributes:
        num_bytes: Size of the vectors in the type of the search.
        rescore: Number of selected vectors, as a multiple of the requested number.

    Raises:
        DataError: A vector is not finite.
    """

    def __init__(
        self,
        store: VectorStore,
        index_type: Any,
        devices: Sequence[str | torch.device],
        dtype: torch.dtype = torch.bfloat16,
        room: int | None = None,
    ) -> None:
        self._store, self.index_type, self._dtype, self.stages = store, index_type, dtype, Stages()
        self.rescore, self.num_vectors = FETCHED[dtype], store.num_vectors
        self.num_bytes = self.num_vectors * store.description.dim * dtype.itemsize
        bounds = [self.num_vectors * number // len(devices) for number in range(len(devices) + 1)]
        self._parts = [
            _Part(torch.device(device), first, end - first)
            for device, first, end in zip(devices, bounds[:-1], bounds[1:], strict=True)
        ]
        self._longest = 0.0  # length of the longest vector
        for part in self._parts:
            self._load(part, room)

    def _load(self, part: _Part, room: int | None) -> None:
        """Copy a part to its device if it fits, and check that its vectors are finite."""
        shape = part.count, self._store.description.dim
        if room is None and part.device.type == "cuda":
            room = int(SHARE_OF_MEMORY * torch.cuda.mem_get_info(part.device)[0])
        size = shape[0] * shape[1]
        if room is None or size * self._dtype.itemsize <= room:
            part.values = torch.empty(shape, dtype=self._dtype, device=part.device)
            if self._dtype == torch.float32:
                part.exact = part.values
            elif room is None or size * (4 + self._dtype.itemsize) <= room:
                part.exact = torch.empty(shape, device=part.device)
        done = 0
        for chunk in self._store.between(part.first, part.first + part.count):
            refuse_not_finite(self._store, chunk, part.first + done)
            self._longest = max(self._longest, float(np.sqrt(np.einsum("vd,vd->v", chunk, chunk).max(initial=0.0))))
            some = slice(done, done + len(chunk))
            targets = [target for target in (part.values, part.exact) if target is not None]
            if targets:
                values = torch.from_numpy(chunk).to(part.device)
                for target in targets:
                    target[some] = values
            done += len(chunk)

    def margin(self, queries: np.ndarray) -> np.ndarray:
        """Return how far from exact an inner product of `search` can be, for each query, float64 [...].

        Args:
            queries: float32 [..., dim].
        """
        lengths = np.linalg.norm(queries, axis=-1).astype(np.float64)
        return np.asarray(ERRORS[self._dtype] * np.maximum(1.0, lengths * self._longest))

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the best vectors of each query, best first.

        Args:
            queries: Query vectors, float32 [queries, dim].
            count: Number of vectors per query; if there are fewer, all are returned.

        Returns:
            Inner products in the type of the search, float32, and indices of vectors, int64, both
            [queries, min(count, vectors)].
        """
        count = min(count, self.num_vectors)
        if not len(queries) or not count:
            return np.zeros((len(queries), count), dtype=np.float32), np.zeros((len(queries), count), dtype=np.int64)
        found = [self._search(part, torch.from_numpy(queries), count) for part in self._parts if part.count]
        home = self._parts[0].device
        every = [torch.cat([part[side].to(home) for part in found], 1) for side in (0, 1)]
        scores, indices = _best(every[0], every[1], count)
        return scores.float().cpu().numpy(), indices.cpu().numpy()

    def _search(self, part: _Part, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the best vectors of a part, products and indices, both [queries, at most count]."""
        on_device = queries.to(part.device, self._dtype)
        scores = torch.empty(len(queries), 0, dtype=self._dtype, device=part.device)
        indices = torch.empty(len(queries), 0, dtype=torch.int64, device=part.device)
        first = part.first
        size = _products(part.device) // len(queries) // GROUP * GROUP
        for block in self._blocks(part, max(GROUP, size)):
            products = on_device @ block.T
            # the lowest of the best so far: a vector with a lower product is not among the best
            lowest = scores[:, -1:] if scores.shape[1] == count else None
            members = _promising(products, count, lowest)
            some = products if members is None else products.gather(1, members)
            own = torch.arange(len(block), device=part.device).expand(len(queries), -1) if members is None else members
            scores, indices = _best(torch.cat([scores, some], 1), torch.cat([indices, own + first], 1), count)
            first += len(block)
        return scores, indices

    def _blocks(self, part: _Part, size: int) -> Iterator[Tensor]:
        """Yield all vectors of a part in the type of the search, at most `size` at a time."""
        if part.values is not None:
            yield from part.values.split(size)
            return
        for chunk in self._store.between(part.first, part.first + part.count, size):
            yield torch.from_numpy(chunk).to(part.device, self._dtype)

    def ranked(
        self, queries: np.ndarray, indices: np.ndarray, divisor: float, ids: np.ndarray, depth: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the best of the found vectors of each query and their scores, by score, then by id, both descending.

        Args:
            queries: float32 [queries, dim].
            indices: Vectors to compare with each query, int64 [queries, vectors].
            divisor: A score is an inner product in double precision divided by it, rounded to float32.
            ids: Place of each vector's id in the order of ids, int64 [vectors of the index].
            depth: Number of vectors per query.
        """
        home = self._parts[0].device
        scores = (self._products(queries, indices) / divisor).float()
        by_id = torch.from_numpy(ids[indices]).to(home).argsort(dim=1, descending=True, stable=True)
        best, order = scores.gather(1, by_id).sort(dim=1, descending=True, stable=True)
        rows = torch.from_numpy(indices).to(home).gather(1, by_id).gather(1, order[:, :depth])
        return list(zip(rows.cpu().numpy(), best[:, :depth].cpu().numpy(), strict=True))

    def exact(self, queries: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return inner products in double precision, float64 [queries, vectors].

        Args:
            queries: float32 [queries, dim].
            indices: Vectors to compare with each query, int64 [queries, vectors].
        """
        return self._products(queries, indices).cpu().numpy()

    def _products(self, queries: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the inner products of `exact` as a tensor on the first device.

        Equal vectors get equal products, because all products are summed in the same order.
        """
        home = self._parts[0].device
        out = torch.empty(indices.shape, dtype=torch.float64, device=home)
        step = max(1, EXACT_NUMBERS // max(1, indices.shape[1] * queries.shape[1]))
        for start in range(0, len(queries), step):
            some, rows = torch.from_numpy(queries[start : start + step]), indices[start : start + step]
            for part in self._parts:
                on_device = some.to(part.device).double()
                own = (rows >= part.first) & (rows < part.first + part.count)
                if part.exact is not None and own.all():
                    values = part.exact[torch.from_numpy(rows - part.first).to(part.device)]
                    out[start : start + step] = (values.double() * on_device.unsqueeze(1)).sum(2).to(home)
                    break
                owners, places = (torch.from_numpy(axis) for axis in own.nonzero())
                if part.exact is None:
                    values = torch.from_numpy(self._store.vectors_at(rows[own])).to(part.device)
                else:
                    values = part.exact[torch.from_numpy(rows[own] - part.first).to(part.device)]
                products = (values.double() * on_device[owners.to(part.device)]).sum(1)
                out[start + owners.to(home), places.to(home)] = products.to(home)
        return out


def _products(device: torch.device) -> int:
    """Return the number of inner products that a device holds at a time."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= FREE_MEMORY:
        return PRODUCTS_ON_GPU
    return PRODUCTS


def _promising(products: Tensor, count: int, lowest: Tensor | None) -> Tensor | None:
    """Return columns that contain the `count` best ones of each query, int64 [queries, columns].

    The columns are divided into groups of `GROUP`. The `count` groups with the highest maxima contain the best columns.
    A group has a column of interest only if its maximum is above `lowest`, so the number of groups is at most the
    largest number of such groups that a query has. The columns of a group are equally far apart: a GPU then reads
    neighbouring columns for the maxima of neighbouring groups.

    Args:
        products: [queries, vectors].
        count: Number of best columns per query.
        lowest: A product below which no column is of interest, [queries, 1]; None: every column is.

    Returns:
        The columns; None: all columns, because there are few.
    """
    if products.shape[1] < 2 * GROUP * count:
        return None
    groups = products.shape[1] // GROUP
    whole = groups * GROUP
    maxima = products[:, :whole].unflatten(1, (GROUP, groups)).amax(1)
    if lowest is not None:
        count = min(count, int((maxima > lowest).sum(1).max()))
    largest = maxima.topk(count, sorted=False).indices
    members = (largest.unsqueeze(2) + groups * torch.arange(GROUP, device=products.device)).flatten(1)
    rest = torch.arange(whole, products.shape[1], device=products.device).expand(len(products), -1)
    return torch.cat([members, rest], 1)


def _best(scores: Tensor, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores of each row with their indices, best first."""
    best = scores.topk(min(count, scores.shape[1]), dim=1)
    return best.values, indices.gather(1, best.indices)
