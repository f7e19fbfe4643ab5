"""Hashes of texts and ids as keys, and the numbers of different keys."""

from __future__ import annotations

import hashlib

import numpy as np

from ranker.errors import DataError

KEY = np.dtype([("high", "<u8"), ("low", "<u4")])  # 96 bits of BLAKE2b; `low` is compared after a search by `high`
_SPLIT = np.dtype([("high", ">u8"), ("low", ">u4")])


def key_of(words: list[str]) -> np.ndarray:
    """Return the keys of texts or ids, `KEY` [words]; equal texts have equal keys."""
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=12).digest() for word in words)
    return np.frombuffer(digests, dtype=_SPLIT).astype(KEY)


class KeyNumbers:
    """Numbers keys from 0 in the order of their first appearance; each key takes 16 bytes of memory.

    Keys are in sorted runs. Two runs are merged if the older run is less than twice as long as the newer run, so each
    key is merged a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # arrays of a run: sorted high, low, number
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of keys, int64 [keys]; -1 for a key without a number."""
        numbers = np.full(len(keys), -1, dtype=np.int64)
        for high, low, known in self._runs:
            positions = np.minimum(np.searchsorted(high, keys["high"]), len(high) - 1)
            hits = high[positions] == keys["high"]
            if np.any(hits & (low[positions] != keys["low"])):
                raise DataError("rows: expected texts of different hashes, got two that share 64 bits; change one")
            numbers[hits] = known[positions[hits]]
        return numbers

    def add(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number keys.

        Returns:
            Number of each key, int64 [keys]; and the index at which each new key first appears, int64 [new].
        """
        numbers = self.find(keys)
        unknown = np.flatnonzero(numbers < 0)
        if not len(unknown):
            return numbers, unknown
        fresh = keys[unknown]
        high, first, inverse = np.unique(fresh["high"], return_index=True, return_inverse=True)
        if np.any(fresh["low"][first][inverse] != fresh["low"]):
            raise DataError("rows: expected texts of different hashes, got two that share 64 bits; change one")
        new_numbers = np.empty(len(first), dtype=np.int32)  # numbered in the order of first appearance
        new_numbers[np.argsort(first)] = self._count + np.arange(len(first), dtype=np.int32)
        numbers[unknown] = new_numbers[inverse]
        self._count += len(first)
        self._runs.append((high, fresh["low"][first].copy(), new_numbers))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge()
        return numbers, unknown[np.sort(first)]

    def sorted_numbers(self) -> np.ndarray:
        """Return all numbers in the order of their keys, int32 [keys]."""
        while len(self._runs) > 1:
            self._merge()
        return self._runs[0][2] if self._runs else np.empty(0, dtype=np.int32)

    def _merge(self) -> None:
        older, newer = self._runs[-2:]
        del self._runs[-2:]
        high = np.concatenate([older[0], newer[0]])
        order = np.argsort(high, kind="stable")  # a stable sort merges two sorted runs in linear time
        low, number = (np.concatenate([older[i], newer[i]])[order] for i in (1, 2))
        self._runs.append((high[order], low, number))
