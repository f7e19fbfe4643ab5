"""Token ids of texts, with the characters that each token covers.

The token store's `TextEncoder` is not used, because it computes no offsets, and because it changes texts with a literal
special token, such as `[SEP]`, and thus the positions of characters. All other texts get the same ids here and there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranker.errors import ConfigError


class OffsetTexts:
    """The token ids of texts, with the characters that each token covers.

    Attributes:
        tokens: Token ids of all texts, int64 [tokens].
        offsets: First token of each text, int64 [texts + 1].
        starts: First character of each token in its text, int64 [tokens].
        ends: One past the last character of each token, int64 [tokens].

    Raises:
        ConfigError: The tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                "encoder tokenizer: expected a fast one, which gives character offsets, got "
                f"{type(tokenizer).__name__!r}"
            )
        backend = copy.deepcopy(backend)  # a copy, so that the caller's tokenizer does not change
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # a literal [SEP] in a text is text
        control = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        control -= {tokenizer.unk_token_id}
        ids, starts, ends, lengths = [], [], [], []
        for encoding in backend.encode_batch(list(texts), add_special_tokens=False):
            tokens = [
                (token, *characters)
                for token, characters in zip(encoding.ids, encoding.offsets, strict=True)
                if token not in control
            ]
            lengths.append(len(tokens))
            ids += [token for token, _, _ in tokens]
            starts += [start for _, start, _ in tokens]
            ends += [end for _, _, end in tokens]
        self.tokens = np.array(ids, dtype=np.int64)
        self.starts, self.ends = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64 [texts]."""
        return np.diff(self.offsets)

    def tokens_of(self, text: int, start: int, end: int) -> tuple[int, int]:
        """Return the first token, and one past the last, in the characters `start` to `end` (exclusive) of a text."""
        tokens = slice(self.offsets[text], self.offsets[text + 1])
        first = int(np.searchsorted(self.ends[tokens], start, side="right"))
        last = int(np.searchsorted(self.starts[tokens], end, side="left"))
        return first, max(first, last)
