"""What the search on a CPU computes for docs. Numba compiles and caches it at its first use.

The similarity of a query token with a compressed vector is that of the vector's centroid, plus an entry of a table for
each half byte of the packed residual, times the vector's scale. No vector is decompressed (WARP; Scheerer et al., 2025,
arXiv:2501.17788).
"""

from __future__ import annotations

import numpy as np

from ranker.retrieval.late.compiled import compiled
from ranker.retrieval.late.query_kernels import AHEAD, columns_of
from ranker.retrieval.late.tiles import GROUPS, LANES, ROWS, highest, highest_wide
from ranker.retrieval.late.vector_code import BLOCK, fetch, sums

LATER = 6  # probed blocks between the one that is read and the one that is fetched into the cache

Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@compiled
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


@compiled
def probed(
    similarities: np.ndarray, least: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """List the blocks that are at a probed centroid.

    Args:
        similarities: See `query_kernels.integers`.
        least: See `query_kernels.bounds`.
        starts: See `lists`.
        sizes: See `lists`.

    Returns:
        The blocks, int32 [blocks]; the centroid of each, int32 [blocks]; and the number of their vectors.
    """
    blocks, cells = np.empty(starts[-1], dtype=np.int32), np.empty(starts[-1], dtype=np.int32)
    number, vectors = 0, 0
    for cell in range(len(sizes)):
        near = False
        for token in range(len(least)):
            near |= similarities[cell, token] >= least[token]
        if near:
            vectors += sizes[cell]
            for block in range(starts[cell], starts[cell + 1]):
                blocks[number], cells[number] = block, cell
                number += 1
    return blocks[:number], cells[:number], vectors


@compiled
def scan(
    similarities: np.ndarray, least: np.ndarray, floors: np.ndarray, table: np.ndarray, cells: Lists, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the highest similarity of each token with each doc, among the vectors at the centroids that it probes.

    A token probes the centroids whose similarity reaches its bound. If it finds nothing higher in a doc, its similarity
    with the doc is its floor (the missing similarities of WARP).

    Args:
        similarities: See `query_kernels.integers`.
        least: See `query_kernels.bounds`.
        floors: Lowest similarity of each token with a doc, int16 [tokens].
        table: See `query_kernels.tables`.
        cells: See `lists`.
        slots: Working memory, int32 [docs]; all -1 before and after the call.

    Returns:
        Rows of the docs with a vector at a probed centroid, int64 [found]; the similarities, int16 [tokens, at least
        found].
    """
    blocks, docs, starts, sizes = cells
    order, own, room = probed(similarities, least, starts, sizes)
    room, tokens = min(room, len(slots)), len(least)
    best, found, number = np.empty((tokens, room), dtype=np.int16), np.empty(room, dtype=np.int64), 0
    for token in range(tokens):
        best[token] = floors[token]
    asking, part = np.empty(tokens, dtype=np.int64), np.empty((tokens, BLOCK), dtype=np.int16)
    columns, count = np.empty(BLOCK, dtype=np.uint32), 0
    for place in range(len(order)):
        block, cell, later = order[place], own[place], order[min(place + LATER, len(order) - 1)]
        fetch(docs, later)  # type: ignore[call-arg]
        if place == 0 or cell != own[place - 1]:
            count = 0
            for token in range(tokens):
                asking[count] = token
                count += similarities[cell, token] >= least[token]
        for row in range(count):
            start = np.int64(similarities[cell, asking[row]])
            sums(blocks, block, table, asking[row], start, part[row], later)  # type: ignore[call-arg, arg-type]
        filled = min(BLOCK, sizes[cell] - BLOCK * (block - starts[cell]))
        for vector in range(filled):
            doc = docs[block, vector]
            if slots[doc] < 0:
                slots[doc], found[number] = number, doc
                number += 1
            columns[vector] = slots[doc]
        for row in range(count):
            highest_of = best[asking[row]]
            for vector in range(filled):  # without a branch, which the processor often predicts wrongly
                new, old = part[row, vector], highest_of[columns[vector]]
                highest_of[columns[vector]] = new if new > old else old
    for slot in range(number):
        slots[found[slot]] = -1
    return found[:number], best


@compiled
def totals(best: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of integer similarities times the steps of the tokens, float32 [count].

    Args:
        best: The similarities, int16 [tokens, at least count docs].
        steps: Of each token, float32 [tokens].
        count: Number of docs.
    """
    out = np.zeros(count, dtype=np.float32)
    for token in range(len(steps)):
        for doc in range(count):
            out[doc] += np.float32(best[token, doc]) * steps[token]
    return out


@compiled
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
