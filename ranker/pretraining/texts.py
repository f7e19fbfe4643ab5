"""The texts of a pretraining: the docs of a collection, their blocks, and rows of texts with special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ranker.data.ragged import ranges, row_offsets
from ranker.data.template import Template
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError
from ranker.hashing import digest, mix
from ranker.types import TokenBatch


class Ragged(NamedTuple):
    """Token ids of several rows: row r is `tokens[offsets[r]:offsets[r + 1]]`.

    Attributes:
        tokens: int64 [tokens].
        offsets: int64 [rows + 1].
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Ragged:
        """Concatenate rows, each an array [tokens of the row]."""
        joined = np.concatenate([np.zeros(0, dtype=np.int64), *rows]).astype(np.int64)
        return cls(joined, row_offsets([len(row) for row in rows]))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    def __getitem__(self, row: Any) -> np.ndarray:  # type: ignore[override]
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def keys(self) -> np.ndarray:
        """Return a hash of each row's tokens, uint64 [rows]."""
        hashes = mix(self.tokens, ranges(0, self.lengths))
        total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        return mix(total[self.offsets[1:]] - total[self.offsets[:-1]], self.lengths)


@dataclass(frozen=True)
class Texts:
    """The docs of a collection, and how they are cut into rows.

    Args:
        store: Token store of the whole docs.
        tokenizer: The encoder's fast tokenizer.
        max_tokens: Number of tokens of the longest block, without special tokens.
        max_query_tokens: Number of tokens of the longest text that is used as a query.
        seed: Seed of all draws.
    """

    store: TokenStore
    tokenizer: Any
    max_tokens: int
    max_query_tokens: int
    seed: int = 0

    def fitting(self, positions: int, pairs: bool) -> Texts:
        """Return the texts with blocks short enough for an encoder, or for an encoder that also reads a query.

        Args:
            positions: Number of tokens of the longest row that the encoder can read.
            pairs: Whether rows also have a query.

        Raises:
            ConfigError: A row has no room for two tokens of a doc.
        """
        layout = Template.of(self.tokenizer, 2 if pairs else 1)
        room = positions - layout.num_special - (self.max_query_tokens if pairs else 0)
        if room < 2:
            raise ConfigError(
                f"max_query_tokens: expected at most {positions - layout.num_special - 2}, which leaves room for a doc "
                f"in the encoder's {positions} positions, got {self.max_query_tokens}; lower it"
            )
        return replace(self, max_tokens=min(self.max_tokens, room))

    def blocks(self) -> Blocks:
        """Cut each doc into the smallest number of blocks, of nearly equal length. An empty doc has no block."""
        lengths = self.store.lengths.astype(np.int64)
        counts = -(-lengths // self.max_tokens)
        docs = np.repeat(np.arange(len(lengths)), counts)
        number = ranges(0, counts)
        starts = number * lengths[docs] // counts[docs]
        ends = (number + 1) * lengths[docs] // counts[docs]
        return Blocks(self.store, docs, starts, ends - starts)

    @cached_property
    def words(self) -> np.ndarray:
        """Ids of the vocabulary except special tokens, int64 [words]."""
        known = set(self.tokenizer.get_vocab().values()) - set(self.tokenizer.all_special_ids)
        return np.array(sorted(known), dtype=np.int64)

    def fingerprint(self, *more: Any) -> str:
        """Return a hash of everything that the draws depend on, except the seed.

        Args:
            more: Values of the objective that are hashed, too.
        """
        return digest(repr((self.store.meta.get("texts"), self.max_tokens, self.max_query_tokens, more)).encode())


class Blocks(NamedTuple):
    """Consecutive parts of docs.

    Attributes:
        store: The docs.
        docs: Index of each block's doc in the store, int64 [blocks].
        starts: Index of each block's first token in its doc, int64 [blocks].
        lengths: Number of tokens of each block, int64 [blocks].
    """

    store: TokenStore
    docs: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def take(self, chosen: np.ndarray) -> Ragged:
        """Return the tokens of some blocks."""
        lengths = self.lengths[chosen]
        first = self.store.offsets[self.docs[chosen]] + self.starts[chosen]
        return Ragged(self.store.tokens[ranges(first, lengths)].astype(np.int64), row_offsets(lengths))

    def those(self, kept: np.ndarray) -> Blocks:
        """Return the blocks with the indices `kept`."""
        return Blocks(self.store, self.docs[kept], self.starts[kept], self.lengths[kept])


def lay_out(layout: Template, texts: Sequence[Ragged], rows: np.ndarray, row_ids: np.ndarray) -> TokenBatch:
    """Build rows from one text or from a pair of texts each, with special tokens around them.

    Args:
        layout: The special tokens around the texts.
        texts: The texts of the rows: one ragged array if the layout has one text, two if it has two.
        rows: Indices of the chosen rows, int64 [chosen].
        row_ids: Ids of these rows in the optimizer step, on which dropout depends [chosen].
    """
    parts: Any = [(text, rows, text.lengths[rows]) for text in texts]
    return replace(layout.lay_out(parts), row_ids=torch.from_numpy(row_ids.astype(np.int64)))


def pieces_of(tokenizer: Any) -> list[str]:
    """Return the string of each token id as the vocabulary spells it; empty for an unused id."""
    vocabulary = tokenizer.get_vocab()
    pieces = [""] * (1 + max(vocabulary.values()))
    for piece, number in vocabulary.items():
        pieces[number] = piece
    return pieces


def uniform(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers to float64 in [0, 1), elementwise.

    >>> bool(0 <= uniform(1, 2) < 1)
    True
    """
    values: np.ndarray = (mix(*parts) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return values


def below(number: int | np.ndarray, *parts: int | np.ndarray) -> np.ndarray:
    """Hash integers to int64 from 0 to `number` - 1, elementwise; `number` must be far below 2 ** 32."""
    return (mix(*parts) % np.asarray(number).astype(np.uint64)).astype(np.int64)


def rows_of(ragged: Ragged) -> np.ndarray:
    """Return the index of each token's row, int64 [tokens]."""
    return np.repeat(np.arange(len(ragged.offsets) - 1), ragged.lengths)
