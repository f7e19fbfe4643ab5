"""Tokens of a few texts in memory, for a collator that reads token stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ranker.data.ragged import row_offsets
from ranker.data.token_store import TokenStore
from ranker.data.token_writer import TextEncoder


class MemoryStore(TokenStore):
    """A token store without files; no other process can open it.

    Args:
        encode: Tokenizes and truncates texts.
        texts: Id -> text.
    """

    def __init__(self, encode: TextEncoder, texts: Mapping[str, str]) -> None:
        self.folder, self.meta = Path("memory"), {}
        lengths, self.tokens = encode(list(texts.values()))
        self.lengths, self.offsets = lengths.astype(np.int32), row_offsets(lengths)
        self._ids = np.array([text_id.encode() for text_id in texts], dtype=np.bytes_)
        self._order = np.argsort(self._ids, kind="stable")
