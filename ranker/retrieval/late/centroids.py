"""Centroids of token vectors by k-means in two levels, which avoids comparing each vector with all centroids.

The first level divides the vectors into about sqrt(k) groups; the second finds centroids within each group. A vector is
compared with the centroids of its `PROBES` nearest groups only, about `PROBES * sqrt(k)` of k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ranker.types import Movable

ITERATIONS = 6  # of k-means
SAMPLE_PER_CENTROID = 32  # size of the k-means sample, in vectors per centroid
PROBES = 3  # nearest groups whose centroids are compared with a vector
BLOCK, GPU_BLOCK = 2**14, 2**19  # vectors compared at a time on a CPU, and on a GPU


def default_count(num_vectors: int) -> int:
    """Return the number of centroids: 16 sqrt(vectors), rounded down to a power of two (Santhanam et al., 2022b).

    For few vectors, the number is smaller, so that there are at least four vectors per centroid.

    >>> default_count(1_107_000), default_count(1000), default_count(1)
    (16384, 250, 1)
    """
    rule = 2 ** int(16 * num_vectors**0.5).bit_length() // 2
    return max(1, min(rule, num_vectors // 4))


@dataclass
class Centroids(Movable):
    """Centroids, sorted by group.

    Args:
        values: Centroids, float32 [centroids, dim].
        groups: Means of the groups, float32 [groups, dim].
        starts: Group g has the centroids `starts[g]` to `starts[g + 1]`, int64 [groups + 1].
    """

    values: Tensor
    groups: Tensor
    starts: Tensor

    def nearest(self, vectors: Tensor) -> Tensor:
        """Return the centroid of each vector, int64 [vectors]: the nearest by L2 of its `PROBES` nearest groups'.

        Args:
            vectors: float32 [vectors, dim], on the same device as the centroids.
        """
        halves, starts = (self.values * self.values).sum(1) / 2, self.starts.tolist()
        codes = torch.empty(len(vectors), dtype=torch.int64, device=vectors.device)
        size = BLOCK if vectors.device.type == "cpu" else GPU_BLOCK
        for first in range(0, len(vectors), size):
            block = vectors[first : first + size]
            near = _distances(block, self.groups).topk(min(PROBES, len(self.groups)), largest=True).indices
            best = torch.full((len(block),), -torch.inf, device=block.device)
            code = torch.zeros(len(block), dtype=torch.int64, device=block.device)
            order = near.flatten().argsort(stable=True)
            rows = order.div(near.shape[1], rounding_mode="floor")
            sizes = torch.bincount(near.flatten(), minlength=len(self.groups)).tolist()
            for group, some in enumerate(rows.split(sizes)):
                if not len(some):
                    continue
                part = slice(starts[group], starts[group + 1])
                score, place = (block[some] @ self.values[part].T - halves[part]).max(1)
                highest = best[some]  # without indices of the better ones only, for which the host would wait
                code[some] = torch.where(score > highest, place + starts[group], code[some])
                best[some] = torch.maximum(score, highest)
            codes[first : first + size] = code
        return codes


def train(sample: Tensor, count: int, seed: int = 0) -> Centroids:
    """Return `count` centroids, or fewer if the sample has too few vectors, by k-means in two levels.

    Values are rounded to float16, the type in which they are stored. Sums are in float64, so that the order of
    additions on a GPU does not change the rounded result.

    Args:
        sample: The vectors that k-means clusters, float32 [vectors, dim], at least one.
        count: Number of centroids.
        seed: Seed of the random choice of the initial centroids.
    """
    count = min(count, len(sample))
    groups = _k_means(sample, max(1, round(count**0.5)), seed)
    members = _assign(sample, groups)
    sizes = torch.bincount(members, minlength=len(groups))
    kept = sizes > 0
    parts = sample[members.argsort(stable=True)].split(sizes[kept].tolist())
    # each group gets centroids in proportion to its share of the sample (largest remainder method), at least one
    shares = sizes[kept].double() * count / len(sample)
    counts = shares.floor().clamp(min=1).long()
    missing = max(0, count - int(counts.sum()))
    counts[(shares - shares.floor()).argsort(descending=True, stable=True)[:missing]] += 1
    own = [_k_means(part, min(size, len(part)), seed + 1) for part, size in zip(parts, counts.tolist(), strict=True)]
    starts = torch.tensor([0, *(len(part) for part in own)], device=sample.device).cumsum(0)
    return Centroids(torch.cat(own).half().float(), groups[kept].half().float(), starts)


def _k_means(vectors: Tensor, count: int, seed: int) -> Tensor:
    """Return `count` centroids by Lloyd's algorithm; a centroid without vectors is replaced by a random vector."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(vectors), generator=generator).to(vectors.device)
    centroids = vectors[order[:count]]
    for _ in range(ITERATIONS if count < len(vectors) else 0):
        members = _assign(vectors, centroids)
        sizes = torch.bincount(members, minlength=count)
        sums = torch.zeros(centroids.shape, dtype=torch.float64, device=vectors.device).index_add_(
            0, members, vectors.double()
        )
        centroids = (sums / sizes.clamp(min=1).unsqueeze(1)).float()
        empty = (sizes == 0).nonzero().squeeze(1)
        centroids[empty] = vectors[order[-len(empty) :]] if len(empty) else centroids[empty]
    return centroids


def _assign(vectors: Tensor, centroids: Tensor) -> Tensor:
    return torch.cat([_distances(block, centroids).argmax(1) for block in vectors.split(BLOCK)])


def _distances(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Return a score that orders centroids by L2 distance, the nearest highest, [vectors, centroids]."""
    return vectors @ centroids.T - (centroids * centroids).sum(1) / 2
