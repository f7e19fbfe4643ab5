"""Functions for the search on a CPU. Numba compiles them at their first use and caches the result on disk.

Similarities with the query are 16-bit integers. A row holds those of up to `LANES` query tokens, so that four 64-bit
additions add two rows. The similarities of a compressed vector are the row of its centroid plus one row of a table for
each byte of its packed residual, so no vector is decompressed (WARP; Scheerer et al., 2025, arXiv:2501.17788).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LANES = 16  # query tokens in a row of similarities; a lane is the place of one token
WORDS = 4  # 64-bit words in a row of LANES 16-bit integers
BINS = 2048  # of the histogram that finds the best centroids of a token


@njit(nogil=True, cache=True)
def byte_table(query: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the inner product of each query token with each value of each byte, float32 [bytes, 256, LANES].

    Args:
        query: The vectors of the tokens, as columns, float32 [bytes * dimensions per byte, LANES].
        values: The residual values that each byte encodes, float32 [256, dimensions per byte].
    """
    numbers = values.shape[1]
    num_bytes = query.shape[0] // numbers
    out = np.zeros((num_bytes, 256, LANES), dtype=np.float32)
    for place in range(num_bytes):
        for byte in range(256):
            for number in range(numbers):
                weight = values[byte, number]
                for lane in range(LANES):
                    out[place, byte, lane] += weight * query[place * numbers + number, lane]
    return out


@njit(nogil=True, cache=True)
def scaled(similarities: np.ndarray, table: np.ndarray) -> tuple[Any, Any, Any, Any]:
    """Scale similarities to 16-bit integers such that the sum for a vector fits into 16 bits, too.

    The minimum over all centroids, or over all values of a byte, is subtracted first. This changes all similarities of
    a token by the same constant.

    Args:
        similarities: Similarity of each centroid with each token, float32 [centroids, LANES].
        table: See `byte_table`.

    Returns:
        `similarities` and `table` as uint16, of the same shapes; the scaled inner product of a residual of zeros,
        uint16 [LANES]; and the scale, by which all values were multiplied.
    """
    low, high = similarities[0].copy(), similarities[0].copy()
    for row in range(similarities.shape[0]):
        for lane in range(LANES):
            low[lane] = min(low[lane], similarities[row, lane])
            high[lane] = max(high[lane], similarities[row, lane])
    widths = high - low
    lows = table[:, 0].copy()
    for place in range(table.shape[0]):
        highs = table[place, 0].copy()
        for byte in range(256):
            for lane in range(LANES):
                lows[place, lane] = min(lows[place, lane], table[place, byte, lane])
                highs[lane] = max(highs[lane], table[place, byte, lane])
        widths += highs - lows[place]
    span = widths.max()
    scale = np.float32((65534.0 - table.shape[0]) / max(span, 1e-20))  # rounding adds at most 1/2 to each term
    centroids = np.empty(similarities.shape, dtype=np.uint16)
    for row in range(similarities.shape[0]):
        for lane in range(LANES):
            centroids[row, lane] = np.uint16((similarities[row, lane] - low[lane]) * scale + np.float32(0.5))
    parts = np.empty(table.shape, dtype=np.uint16)
    for place in range(table.shape[0]):
        for byte in range(256):
            for lane in range(LANES):
                value = (table[place, byte, lane] - lows[place, lane]) * scale
                parts[place, byte, lane] = np.uint16(value + np.float32(0.5))
    zeros = np.empty(LANES, dtype=np.uint16)
    for lane in range(LANES):
        zeros[lane] = np.uint16(max(np.float32(0.0), -lows[:, lane].sum() * scale))
    return centroids, parts, zeros, scale


@njit(nogil=True, cache=True)
def probe(centroids: np.ndarray, tokens: int, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest centroids of each token: `count`, or a few more, since a histogram gives the bound.

    Args:
        centroids: Similarity of each centroid with each token, uint16 [centroids, LANES].
        tokens: Number of lanes that hold a token; the lanes after them are empty.
        counts: Numbers of centroids per token, int64 [counts].

    Returns:
        For each count: whether a centroid is among the nearest of any token, bool [counts, centroids]; and for each
        token a lower bound of the similarities of its nearest centroids, uint16 [counts, LANES], 0 for empty lanes.
    """
    shift = np.uint16(5)  # 65536 / BINS = 2**5
    histogram = np.zeros((BINS, LANES), dtype=np.int32)
    for row in range(centroids.shape[0]):
        for lane in range(LANES):
            histogram[centroids[row, lane] >> shift, lane] += 1
    bounds = np.zeros((len(counts), LANES), dtype=np.uint16)
    probed = np.zeros((len(counts), centroids.shape[0]), dtype=np.bool_)
    for some in range(len(counts)):
        least = np.full(LANES, 65535, dtype=np.uint16)  # no similarity in an empty lane reaches it
        for lane in range(tokens):
            left = counts[some]
            for place in range(BINS - 1, -1, -1):
                left -= histogram[place, lane]
                if left <= 0:
                    bounds[some, lane] = np.uint16(place << 5)
                    break
            least[lane] = bounds[some, lane]
        for row in range(centroids.shape[0]):
            near = np.uint16(0)
            for lane in range(LANES):
                near |= np.uint16(centroids[row, lane] >= least[lane])
            probed[some, row] = near > 0
    return probed, bounds


@njit(nogil=True, cache=True)
def gather(
    centroids: np.ndarray,
    probed: np.ndarray,
    bounds: np.ndarray,
    entries: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Score each doc with a vector at a probed centroid by the similarities of these centroids (PLAID's stage 2).

    The similarity of a token with a doc is the highest of the token's bound and the doc's probed centroids. The bound
    replaces the unknown similarities of the doc's other vectors.

    Args:
        centroids: Similarity of each centroid with each token, uint16 [centroids, LANES].
        probed: Whether a centroid is probed, bool [centroids].
        bounds: See `probe`.
        entries: See `Arrays`, int32 [entries].
        starts: See `Arrays`, int64 [centroids + 1].
        slots: Working memory, int32 [docs]; all -1 before and after the call.

    Returns:
        Rows of the docs, int64 [found], and their scores, int64 [found].
    """
    room = 0
    for row in range(len(probed)):
        if probed[row]:
            room += starts[row + 1] - starts[row]
    room = min(room, len(slots))
    best = np.empty((room, LANES), dtype=np.uint16)
    found = np.empty(room, dtype=np.int64)
    number = 0
    for row in range(len(probed)):
        if not probed[row]:
            continue
        for entry in range(starts[row], starts[row + 1]):
            slot = slots[entries[entry]]
            if slot < 0:
                slot = number
                number += 1
                slots[entries[entry]] = slot
                found[slot] = entries[entry]
                for lane in range(LANES):
                    best[slot, lane] = bounds[lane]
            for lane in range(LANES):
                best[slot, lane] = max(best[slot, lane], centroids[row, lane])
    scores = np.zeros(number, dtype=np.int64)
    for slot in range(number):
        slots[found[slot]] = -1
        for lane in range(LANES):
            scores[slot] += np.int64(best[slot, lane])
    return found[:number], scores


@njit(nogil=True, cache=True)
def refine(
    centroids: np.ndarray,
    parts: np.ndarray,
    probed: np.ndarray,
    bounds: np.ndarray,
    vectors: tuple[np.ndarray, np.ndarray, np.ndarray],
    docs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Score docs by those of their compressed vectors that lie at probed centroids.

    Args:
        centroids: Scaled similarities of the centroids, four 16-bit lanes in a word, uint64 [centroids, WORDS].
        parts: Scaled inner products of the bytes, in the same format, uint64 [bytes * 256, WORDS].
        probed: Whether a centroid is probed, bool [centroids].
        bounds: Lowest similarity of each token with a doc, in place of the doc's other vectors, uint16 [LANES].
        vectors: `codes`, `residuals` and `ends` of `Arrays`.
        docs: Rows of the docs to score, each with a vector, int64 [docs].

    Returns:
        The scores, int64 [docs], and the index of the vector most similar to each token, int64 [docs, LANES]; if
        no vector is more similar than the bound, that of the doc's first vector.
    """
    codes, residuals, ends = vectors
    scores = np.zeros(len(docs), dtype=np.int64)
    chosen = np.empty((len(docs), LANES), dtype=np.int64)
    places = np.empty(LANES, dtype=np.int32)
    words = np.empty((1, WORDS), dtype=np.uint64)
    lanes = words.view(np.uint16)
    best = np.empty(LANES, dtype=np.uint16)
    near = np.empty(1024, dtype=np.int64)
    touched = np.zeros(1, dtype=np.uint8)
    for number in range(len(docs)):
        doc = docs[number]
        first = ends[doc - 1] if doc > 0 else 0
        if ends[doc] - first > len(near):
            near = np.empty(2 * (ends[doc] - first), dtype=np.int64)
        count = np.int64(0)
        for vector in range(first, ends[doc]):  # without an `if`, whose branch a CPU would often predict wrongly
            near[count] = vector
            count += np.int64(probed[codes[vector]])  # type: ignore[assignment]
        best[:] = bounds
        places[:] = -1
        for some in range(count):  # loads the residuals into the cache: reads overlap here, not in the loop below
            touched[0] ^= residuals[near[some], 0]
        for some in range(count):
            row = np.uint64(near[some])
            start = centroids[np.uint64(codes[row])]
            sum0, sum1, sum2, sum3 = start[0], start[1], start[2], start[3]
            packed = residuals[row]
            for place in range(np.uint64(packed.shape[0])):
                part = parts[(np.uint64(place) << np.uint64(8)) + np.uint64(packed[place])]
                sum0 += part[0]
                sum1 += part[1]
                sum2 += part[2]
                sum3 += part[3]
            words[0, 0], words[0, 1], words[0, 2], words[0, 3] = sum0, sum1, sum2, sum3
            for lane in range(LANES):
                better = lanes[0, lane] > best[lane]
                best[lane] = max(best[lane], lanes[0, lane])
                places[lane] = np.int32(some) if better else places[lane]
        for lane in range(LANES):
            scores[number] += np.int64(best[lane])
            chosen[number, lane] = near[places[lane]] if places[lane] >= 0 else first
    return scores, chosen


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
