"""Count tokens over a collection."""

from __future__ import annotations

import numpy as np

from ranker.data.ragged import ranges
from ranker.data.token_store import TokenStore

DOCS = 16384  # number of docs that are counted at a time


def document_frequencies(store: TokenStore, max_tokens: int, size: int) -> np.ndarray:
    """Return the number of texts with each token, int64 [size].

    Args:
        store: The texts.
        max_tokens: Number of first tokens of a text that count.
        size: Number of token ids.
    """
    counts = np.zeros(size, dtype=np.int64)
    for first in range(0, len(store), DOCS):
        rows = np.arange(first, min(first + DOCS, len(store)))
        lengths = np.minimum(store.lengths[rows], max_tokens).astype(np.int64)
        tokens = store.tokens[ranges(store.offsets[rows], lengths)].astype(np.int64)
        cells = np.unique(np.repeat(rows - first, lengths) * size + tokens)
        counts += np.bincount(cells % size, minlength=size)
    return counts
