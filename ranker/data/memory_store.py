"""Tokens of a few texts in memory, for a collator that reads token stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ranker.data.ragged import row_offsets
from ranker.data.token_writer import TextEncoder


class MemoryStore:
    """What a collator reads of `TokenStore`, without files.

    Args:
        encode: Tokenizes and truncates texts.
        texts: Id -> text.

    Attributes:
        tokens: Token ids of all texts [tokens].
        offsets: Start of each row, int64 [rows + 1].
        lengths: Number of tokens of each row, int32 [rows].
    """

    def __init__(self, encode: TextEncoder, texts: Mapping[str, str]) -> None:
        lengths, self.tokens = encode(list(texts.values()))
        self.lengths = lengths.astype(np.int32)
        self.offsets = row_offsets(lengths)
        self._row_of = {text_id: row for row, text_id in enumerate(texts)}

    def rows(self, ids: Iterable[str] | np.ndarray) -> np.ndarray:
        """Return the rows of text ids, int64 [ids].

        Args:
            ids: Strings, or an array of UTF-8 bytes like `Candidates.doc_ids`.

        Raises:
            KeyError: There is no such text.
        """
        names = [name.decode() for name in ids.tolist()] if isinstance(ids, np.ndarray) else ids
        return np.array([self._row_of[name] for name in names], dtype=np.int64)
