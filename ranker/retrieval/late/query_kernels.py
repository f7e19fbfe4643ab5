"""What the search on a CPU computes for a query before it reads docs. Numba compiles and caches it at its first use.

The similarities of a query token are 16-bit integers in units of the token's own step.
"""

from __future__ import annotations

import numpy as np

from ranker.retrieval.late.compiled import compiled
from ranker.retrieval.late.tiles import GROUPS, LANES, ROWS, rounded, rounded_wide

ENTRY = 63  # largest entry of a table: four of them fit into a byte
REACH = 8000  # largest absolute similarity; times 4, it fits into 16 bits
SAMPLE = 4096  # about how many centroids give the result of `bounds`
BINS = 4096  # of the histograms in `bounds`
AHEAD = 4 * ROWS  # vectors between those that are compared and those that are fetched into the cache


@compiled
def merged(query: np.ndarray, least: float) -> np.ndarray:
    """Merge similar vectors of a query into sums, so that fewer vectors are compared.

    Each vector is added to the first sum with which its cosine is at least `least`, or else begins a new sum. The
    similarity of a sum with a doc is close to the sum of the similarities of its vectors. ColBERT's [MASK] vectors are
    often nearly equal.

    Args:
        query: float32 [tokens, dim].
        least: Smallest cosine at which vectors are merged.

    Returns:
        float32 [sums, dim]
    """
    sums = np.zeros(query.shape, dtype=np.float32)
    count = 0
    for token in range(query.shape[0]):
        length = np.sqrt((query[token] * query[token]).sum())
        place = -1
        for other in range(count):
            norm = np.sqrt((sums[other] * sums[other]).sum())
            if (query[token] * sums[other]).sum() >= least * length * norm:
                place = other
                break
        if place < 0:
            place = count
            count += 1
        sums[place] += query[token]
    return sums[:count]


@compiled
def tables(query: np.ndarray, values: np.ndarray, num_bytes: int, longest: float) -> tuple[np.ndarray, ...]:
    """Tabulate the inner products of each token with each value of each half byte of a residual.

    Args:
        query: Vectors of the query, float32 [tokens, dim].
        values: The numbers that a half byte stands for, float32 [16, numbers].
        num_bytes: Bytes of a packed residual, an even number.
        longest: Largest length of a centroid.

    Returns:
        The tables, uint8 [tokens, bytes, 2, 16], each half byte's lowest entry 0; the step of each token, float32
        [tokens]; and the sum of the lowest inner products, which the tables leave out, float32 [tokens].
    """
    numbers = values.shape[1]
    out = np.zeros((query.shape[0], num_bytes, 2, 16), dtype=np.uint8)
    steps, lows = np.ones(query.shape[0], dtype=np.float32), np.zeros(query.shape[0], dtype=np.float32)
    exact, least = np.zeros((2 * num_bytes, 16), dtype=np.float32), np.zeros(2 * num_bytes, dtype=np.float32)
    for token in range(query.shape[0]):
        widest, reach = np.float32(0), np.sqrt((query[token] * query[token]).sum()) * np.float32(longest)
        for half in range(2 * num_bytes):
            lowest, highest = np.float32(np.inf), np.float32(-np.inf)
            for value in range(16):
                product = np.float32(0)
                for number in range(numbers):
                    place = half * numbers + number
                    if place < query.shape[1]:
                        product += values[value, number] * query[token, place]
                exact[half, value] = product
                lowest, highest = min(lowest, product), max(highest, product)
            least[half] = lowest
            lows[token] += lowest
            widest, reach = max(widest, highest - lowest), reach + max(highest, -lowest)
        steps[token] = max(widest / ENTRY, reach / REACH, np.float32(1e-20))
        for half in range(2 * num_bytes):
            for value in range(16):
                entry = (exact[half, value] - least[half]) / steps[token]
                out[token, half // 2, half % 2, value] = np.uint8(entry + np.float32(0.5))
    return out, steps, lows


@compiled
def columns_of(query: np.ndarray) -> np.ndarray:
    """Return vectors of a query [tokens, dim] as columns, filled up with zeros, float32 [groups, dim, LANES]."""
    out = np.zeros(((len(query) + LANES - 1) // LANES, query.shape[1], LANES), dtype=np.float32)
    for token in range(len(query)):
        out[token // LANES, :, token % LANES] = query[token]
    return out


@compiled
def integers(centroids: np.ndarray, columns: np.ndarray, steps: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Return (similarity + low) / step of each centroid with each token, int16 [centroids, groups * LANES].

    Args:
        centroids: Their number is a multiple of `ROWS`, float32 [centroids, dim].
        columns: The query, see `columns_of`.
        steps: See `tables`.
        lows: See `tables`.
    """
    groups = len(columns)
    scaling = np.zeros((2, groups, LANES), dtype=np.float32)
    for token in range(len(steps)):
        scaling[0, token // LANES, token % LANES] = np.float32(1) / steps[token]
        scaling[1, token // LANES, token % LANES] = lows[token] / steps[token]
    out = np.empty((len(centroids), groups * LANES), dtype=np.int16)
    whole = groups - groups % GROUPS
    for row in range(0, len(centroids), ROWS):
        ahead = min(row + AHEAD, len(centroids) - ROWS)
        for group in range(0, whole, GROUPS):
            rounded_wide(centroids, row, ahead, columns, group, out, scaling)
        for group in range(whole, groups):
            rounded(centroids, row, ahead, columns, group, out, scaling)
    return out


@compiled
def bounds(similarities: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each token a bound that about `counts[token]` centroids reach, int16 [tokens].

    Args:
        similarities: See `integers`.
        counts: Number of centroids for each token, int64 [tokens].
    """
    tokens = len(counts)
    histogram = np.zeros((tokens, BINS), dtype=np.int32)
    every = max(1, similarities.shape[0] // SAMPLE)
    for centroid in range(0, similarities.shape[0], every):
        for token in range(tokens):
            histogram[token, (np.int32(similarities[centroid, token]) + 2 * BINS) >> 2] += 1
    out = np.empty(tokens, dtype=np.int16)
    for token in range(tokens):
        left, place = (counts[token] + every - 1) // every, BINS
        while left > 0 and place > 0:
            place -= 1
            left -= histogram[token, place]
        out[token] = np.int16((place << 2) - 2 * BINS)
    return out
