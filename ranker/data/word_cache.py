"""Token ids of words that were tokenized before, for tokenizers that tokenize each word by itself, such as BERT's.

Texts share most of their words, and a look-up costs much less than normalization and WordPiece.
"""

from __future__ import annotations

import re

import numpy as np

from ranker.data.text_encoder import Encoded, TextEncoder

# Size of a cache above which it starts again, up to 80 MB: the characters of its words, and `ENTRY` for each word
MOST_CHARS, ENTRY = 4_000_000, 8
# `str.split` splits at these characters, but BERT's normalizer removes them, which joins what is around them
JOINING = re.compile("[\x0b\x0c\x1c-\x1f\x85]")


class WordCache:
    """Do the same as an encoder that tokenizes each word by itself (`TextEncoder.by_word`); thread-safe.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._known: dict[str, bytes] = {}  # word -> its token ids
        self._chars = 0

    def __call__(self, texts: list[str]) -> Encoded:
        """Return the number of tokens of each text, int64 [texts], and all token ids [tokens], as the encoder does."""
        known, size = self._known, self._encoder.dtype.itemsize
        try:
            rows = [self._row(known, words_of(text)) for text in texts]
        except KeyError:
            known = self._learn({word for text in texts for word in words_of(text)})
            rows = [self._row(known, words_of(text)) for text in texts]
        lengths = np.array([len(row) // size for row in rows], dtype=np.int64)
        return lengths, np.frombuffer(b"".join(rows), dtype=self._encoder.dtype)

    def _row(self, known: dict[str, bytes], words: list[str]) -> bytes:
        return b"".join(map(known.__getitem__, words))[: self._encoder.max_tokens * self._encoder.dtype.itemsize]

    def _learn(self, words: set[str]) -> dict[str, bytes]:
        """Tokenize the words that are not known; return a table that has all words."""
        if self._chars > MOST_CHARS:  # other threads may still read the old table
            self._known, self._chars = {}, 0
        known = self._known
        new = list(words.difference(known))
        lengths, tokens = self._encoder(new)
        ends = np.cumsum(lengths)
        for word, start, end in zip(new, (ends - lengths).tolist(), ends.tolist(), strict=True):
            known[word] = tokens[start:end].tobytes()
            self._chars += len(word) + ENTRY
        return known

    def __getstate__(self) -> dict[str, object]:
        return {"_encoder": self._encoder, "_known": {}, "_chars": 0}


def words_of(text: str) -> list[str]:
    """Return parts of a text that can be tokenized by themselves: its words, or the whole text."""
    return text.split() if text.isprintable() or not JOINING.search(text) else [text]
