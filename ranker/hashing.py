"""Hashes: random numbers that depend only on given integers, and fingerprints of arrays and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def mix(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers to uniform uint64, elementwise (the finaliser of SplitMix64, Steele et al., 2014).

    The value depends on the order of `parts`, which broadcast against each other.

    >>> bool(mix(1, 2) == mix(1, 2)), bool(mix(1, 2) == mix(2, 1))
    (True, False)
    """
    with np.errstate(over="ignore"):
        state: Any = np.uint64(0)
        for part in parts:
            state = (
                state * np.uint64(0x9E3779B97F4A7C15)
                + np.asarray(part).astype(np.uint64)
                + np.uint64(0x632BE59BD9B4E019)
            )
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def digest(*parts: bytes | np.ndarray) -> str:
    """Return a fingerprint of bytes and arrays, 32 hexadecimal digits.

    >>> digest(b"a", np.arange(3)) == digest(b"a", np.arange(3)), digest(b"a") == digest(b"b")
    (True, False)
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def fingerprint_texts(texts: Iterable[tuple[str, str]]) -> str:
    """Return a fingerprint of (id, text) pairs in the order given, 32 hexadecimal digits.

    >>> fingerprint_texts({"q1": "a"}.items()) == fingerprint_texts({"q1": "b"}.items())
    False
    """
    state = hashlib.blake2b(digest_size=16)
    for item in texts:
        state.update(repr(item).encode("utf-8", "surrogatepass"))
    return state.hexdigest()
