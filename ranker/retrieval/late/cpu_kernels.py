"""Functions for the search on a CPU. Numba compiles them at their first use and caches the result on disk.

The similarities of a query token are 16-bit integers in units of the token's own step. That of a compressed vector is
the similarity of its centroid, plus an entry of a table for each half byte of its packed residual, times the vector's
scale. No vector is decompressed (WARP; Scheerer et al., 2025, arXiv:2501.17788).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ranker.retrieval.late.tiles import GROUPS, LANES, ROWS, highest, highest_wide, rounded, rounded_wide
from ranker.retrieval.late.vector_code import BLOCK, fetch, sums

ENTRY = 63  # largest entry of a table: four of them fit into a byte
REACH = 8000  # largest absolute similarity; times 4, it fits into 16 bits
SAMPLE = 4096  # about how many centroids give the bounds of `probe`
BINS = 4096  # of the histograms in `probe`

LATER = 3  # probed centroids between the one whose vectors are read and the one whose vectors are fetched
AHEAD = 4 * ROWS  # vectors between those that are compared and those that are fetched into the cache

Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@njit(nogil=True, cache=True)
def lists(
    codes: np.ndarray, residuals: np.ndarray, scales: np.ndarray, owners: np.ndarray, num_centroids: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arrange compressed vectors centroid by centroid, in blocks of `BLOCK`; the last block of a centroid has gaps.

    Args:
        codes: Number of the centroid of each vector, integers [vectors].
        residuals: Packed residuals, uint8 [vectors, bytes].
        scales: Factor of each vector as an integer, int16 [vectors].
        owners: Row of the doc of each vector, int32 [vectors]; -1: the vector is left out.
        num_centroids: Number of centroids.

    Returns:
        The residuals, an even number of bytes, and the scales, see `vector_code.plain_sums`, uint8 [blocks, bytes + 2,
        BLOCK]; the docs, int32 [blocks, BLOCK]; the first block of each centroid, int64 [centroids + 1]; and the number
        of its vectors, int64 [centroids].
    """
    sizes = np.zeros(num_centroids, dtype=np.int64)
    for vector in range(len(codes)):
        sizes[codes[vector]] += owners[vector] >= 0
    starts = np.zeros(num_centroids + 1, dtype=np.int64)
    for centroid in range(num_centroids):
        starts[centroid + 1] = starts[centroid] + (sizes[centroid] + BLOCK - 1) // BLOCK
    num_bytes, even = residuals.shape[1], residuals.shape[1] + residuals.shape[1] % 2
    blocks, docs = (
        np.zeros((starts[-1], even + 2, BLOCK), dtype=np.uint8),
        np.zeros((starts[-1], BLOCK), dtype=np.int32),
    )
    filled = np.zeros(num_centroids, dtype=np.int64)
    for vector in range(len(codes)):
        if owners[vector] < 0:
            continue
        centroid = codes[vector]
        block, place = starts[centroid] + filled[centroid] // BLOCK, filled[centroid] % BLOCK
        filled[centroid] += 1
        for byte in range(num_bytes):
            blocks[block, byte, place] = residuals[vector, byte]
        line, column = even + place // (BLOCK // 2), 2 * (place % (BLOCK // 2))
        blocks[block, line, column], blocks[block, line, column + 1] = scales[vector] & 255, scales[vector] >> 8
        docs[block, place] = owners[vector]
    return blocks, docs, starts, sizes


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def columns_of(query: np.ndarray) -> np.ndarray:
    """Return vectors of a query [tokens, dim] as columns, filled up with zeros, float32 [groups, dim, LANES]."""
    out = np.zeros(((len(query) + LANES - 1) // LANES, query.shape[1], LANES), dtype=np.float32)
    for token in range(len(query)):
        out[token // LANES, :, token % LANES] = query[token]
    return out


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def bounds(similarities: np.ndarray, tokens: int, count: int) -> np.ndarray:
    """Return for each token a bound that about `count` centroids reach, int16 [tokens].

    Args:
        similarities: See `integers`.
        tokens: Number of tokens.
        count: Number of centroids.
    """
    histogram = np.zeros((tokens, BINS), dtype=np.int32)
    every = max(1, similarities.shape[0] // SAMPLE)
    for centroid in range(0, similarities.shape[0], every):
        for token in range(tokens):
            histogram[token, (np.int32(similarities[centroid, token]) + 2 * BINS) >> 2] += 1
    out = np.empty(tokens, dtype=np.int16)
    for token in range(tokens):
        left, place = (count + every - 1) // every, BINS
        while left > 0 and place > 0:
            place -= 1
            left -= histogram[token, place]
        out[token] = np.int16((place << 2) - 2 * BINS)
    return out


@njit(nogil=True, cache=True)
def scan(
    similarities: np.ndarray, least: np.ndarray, floors: np.ndarray, table: np.ndarray, cells: Lists, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the highest similarity of each token with each doc, among the vectors at the centroids that it probes.

    A token probes the centroids whose similarity reaches its bound. If it finds nothing higher in a doc, its similarity
    with the doc is its floor (the missing similarities of WARP).

    Args:
        similarities: See `integers`.
        least: See `bounds`.
        floors: Lowest similarity of each token with a doc, int16 [tokens].
        table: See `tables`.
        cells: See `lists`.
        slots: Working memory, int32 [docs]; all -1 before and after the call.

    Returns:
        Rows of the docs with a vector at a probed centroid, int64 [found]; the similarities, int16 [found, tokens].
    """
    blocks, docs, starts, sizes = cells
    tokens, room, probed = len(least), np.int64(0), np.empty(len(sizes), dtype=np.int32)
    num_probed = 0
    for cell in range(len(sizes)):
        near = False
        for token in range(tokens):
            near |= similarities[cell, token] >= least[token]
        probed[num_probed] = cell
        num_probed += near
        room += sizes[cell] if near else 0
    room = min(room, len(slots))
    best, found, number = np.empty((room, tokens), dtype=np.int16), np.empty(room, dtype=np.int64), 0
    asking, part = np.empty(tokens, dtype=np.int64), np.empty((tokens, BLOCK), dtype=np.int16)
    for place in range(num_probed):
        cell, later = probed[place], probed[min(place + LATER, num_probed - 1)]
        for block in range(starts[later], starts[later + 1]):
            fetch(blocks, block)
            fetch(docs, block)
        count = 0
        for token in range(tokens):
            asking[count] = token
            count += similarities[cell, token] >= least[token]
        for block in range(starts[cell], starts[cell + 1]):
            for row in range(count):
                token = asking[row]
                sums(blocks, block, table, token, np.int64(similarities[cell, token]), part, row)
            for vector in range(min(BLOCK, sizes[cell] - BLOCK * (block - starts[cell]))):
                slot = slots[docs[block, vector]]
                if slot < 0:
                    slot = np.int32(number)
                    slots[docs[block, vector]], found[number] = slot, docs[block, vector]
                    best[slot] = floors
                    number += 1
                for row in range(count):
                    token = asking[row]
                    best[slot, token] = max(best[slot, token], part[row, vector])
    for slot in range(number):
        slots[found[slot]] = -1
    return found[:number], best[:number]


@njit(nogil=True, cache=True)
def totals(best: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the sums of integer similarities [docs, tokens] times the steps of the tokens, float32 [docs]."""
    out = np.zeros(len(best), dtype=np.float32)
    for doc in range(len(best)):
        for token in range(len(steps)):
            out[doc] += np.float32(best[doc, token]) * steps[token]
    return out


@njit(nogil=True, cache=True)
def maxsim(vectors: np.ndarray, starts: np.ndarray, ends: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return exact MaxSim with docs, float32 [docs].

    Args:
        vectors: Vectors of docs, float32 [vectors, dim].
        starts: First vector of each doc to score, int64 [docs].
        ends: Index after its last vector, int64 [docs].
        query: Vectors of the query, float32 [tokens, dim].
    """
    tokens, columns = len(query), columns_of(query)
    groups = len(columns)
    whole = groups - groups % GROUPS
    best, last = np.empty((groups, LANES), dtype=np.float32), np.empty((ROWS, query.shape[1]), dtype=np.float32)
    scores = np.zeros(len(starts), dtype=np.float32)
    for doc in range(len(starts)):
        best[:] = -np.inf
        rest, after = (ends[doc] - starts[doc]) % ROWS, starts[min(doc + 1, len(starts) - 1)]
        for row in range(starts[doc], ends[doc] - rest, ROWS):
            ahead = row + AHEAD if row + AHEAD < ends[doc] else after + row + AHEAD - ends[doc]
            for group in range(0, whole, GROUPS):
                highest_wide(vectors, row, ahead, columns, group, best, columns)
            for group in range(whole, groups):
                highest(vectors, row, ahead, columns, group, best, columns)
        for row in range(ROWS if rest else 0):  # repeats the last vector
            last[row] = vectors[min(ends[doc] - rest + row, ends[doc] - 1)]
        for group in range(groups if rest else 0):
            highest(last, 0, 0, columns, group, best, columns)
        for token in range(tokens):
            scores[doc] += best[token // LANES, token % LANES]
    return scores


@njit(nogil=True, cache=True)
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
