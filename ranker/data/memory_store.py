"""A token store in memory, for a collator over a few texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from ranker.data.ragged import row_offsets
from ranker.data.text_encoder import Encoded
from ranker.data.token_store import TokenStore


class MemoryStore(TokenStore):
    """A token store without files; no other process can open it.

    Args:
        encode: Tokenizes and truncates texts.
        texts: Id -> text.
    """

    def __init__(self, encode: Callable[[list[str]], Encoded], texts: Mapping[str, str]) -> None:
        self.folder, self.meta = Path("memory"), {}
        lengths, self.tokens = encode(list(texts.values()))
        self.lengths, self.offsets = lengths.astype(np.int32), row_offsets(lengths)
        self._ids = np.array([text_id.encode() for text_id in texts], dtype=np.bytes_)
        self._order = np.argsort(self._ids, kind="stable")

    @classmethod
    def joined(cls, stores: Sequence[TokenStore]) -> Self:
        """Return a store with the rows of several stores of the same tokenizer; the rows have no ids."""
        joined = cls.__new__(cls)
        joined.folder, joined.meta = Path("memory"), {}
        joined.tokens = np.concatenate([store.tokens for store in stores])
        joined.lengths = np.concatenate([store.lengths for store in stores])
        joined.offsets = row_offsets(joined.lengths)
        joined._ids, joined._order = np.zeros(0, dtype="S1"), np.zeros(0, dtype=np.int64)
        return joined
