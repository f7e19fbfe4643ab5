"""From characters to tokens: the sequences an encoder reads, and which of their tokens a span has after truncation."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ranker.data.template import Template
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError
from ranker.probing.examples import Span
from ranker.types import TokenBatch

READS = ("pairs", "texts")
PAIR = 2  # kind of a row that holds both texts


class OffsetTexts:
    """Token ids of texts with the characters that each token stands for; the same ids as a token store has.

    Attributes:
        tokens: Token ids of all texts, int64 [tokens].
        offsets: Start of each text, int64 [texts + 1].
        starts: First character of each token in its text, int64 [tokens].
        ends: One past its last character, int64 [tokens].
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"encoder tokenizer: expected a fast one, which knows characters, got {type(tokenizer).__name__!r}"
            )
        backend = copy.deepcopy(backend)  # the caller's keeps its state
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # a literal [SEP] in a text is text
        control = {place for place, token in backend.get_added_tokens_decoder().items() if token.special} - {
            tokenizer.unk_token_id
        }
        ids, starts, ends, lengths = [], [], [], []
        for encoding in backend.encode_batch(list(texts), add_special_tokens=False):
            kept = [
                (token, *place)
                for token, place in zip(encoding.ids, encoding.offsets, strict=True)
                if token not in control
            ]
            lengths.append(len(kept))
            ids += [token for token, _, _ in kept]
            starts += [start for _, start, _ in kept]
            ends += [end for _, _, end in kept]
        self.tokens = np.array(ids, dtype=np.int64)
        self.starts, self.ends = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 [texts]."""
        return np.diff(self.offsets)

    def tokens_of(self, text: int, start: int, end: int) -> tuple[int, int]:
        """First and one past last token of a text that hold a character of `start` to `end`."""
        own = slice(self.offsets[text], self.offsets[text + 1])
        first = int(np.searchsorted(self.ends[own], start, side="right"))
        last = int(np.searchsorted(self.starts[own], end, side="left"))
        return first, max(first, last)


@dataclass(frozen=True)
class Sequences:
    """The token sequences of some (query, doc) pairs, shortest first, as an encoder reads them.

    A cross-encoder reads both texts in one sequence (`pairs`), a bi-encoder one text a sequence (`texts`), each text
    once. A pair with an empty query is its doc alone.

    Args:
        texts: The texts.
        queries: Each sequence's first text, or -1; int64 [rows].
        docs: Its second text, or -1; int64 [rows].
        kept: Tokens kept of each, special tokens not counted, int64 [rows, 2].
        starts: First token of each sequence in the flat axis of all of them, int64 [rows + 1].
        places: Row of each pair's query and doc, int64 [pairs, 2]; -1 where it has none.
        pair: Layout of two texts.
        query: Layout of a query by itself.
        doc: Layout of a doc by itself.
    """

    texts: OffsetTexts
    queries: np.ndarray
    docs: np.ndarray
    kept: np.ndarray
    starts: np.ndarray
    places: np.ndarray
    pair: Template
    query: Template
    doc: Template

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[str, str]],
        tokenizer: Any,
        reads: str,
        positions: int,
        max_query_tokens: int,
        max_doc_tokens: int,
        layouts: tuple[Template, Template] | None = None,
    ) -> Sequences:
        """Tokenize and lay out.

        Args:
            pairs: (query, doc) texts.
            tokenizer: A fast tokenizer.
            reads: `pairs` or `texts`.
            positions: Longest sequence that the encoder takes.
            max_query_tokens: Longest query; longer ones are cut.
            max_doc_tokens: Longest doc; in a pair it is also cut to what the positions leave.
            layouts: The ranker's own layouts of a query and of a doc by themselves; None: the tokenizer's.

        Raises:
            ConfigError: An unknown `reads`, or positions that leave no room.
        """
        if reads not in READS:
            raise ConfigError(f"reads: expected one of {', '.join(READS)}; got {reads!r}")
        unique = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        texts = OffsetTexts(tokenizer, list(unique))
        pair, single = Template.of(tokenizer, 2), Template.of(tokenizer, 1)
        alone = layouts or (single, single)
        if positions < pair.num_special + 2:
            raise ConfigError(
                f"encoder: expected room for at least {pair.num_special + 2} tokens, got {positions} positions"
            )
        placed = np.array([[unique[query] if query else -1, unique[doc]] for query, doc in pairs], dtype=np.int64)
        if reads == "pairs":
            rows, inverse = np.unique(placed, axis=0, return_inverse=True)
            places = np.stack([inverse.ravel(), inverse.ravel()], axis=1)
        else:
            # a text may be a query in one pair and a doc in another, with another limit
            nothing = np.full(len(placed), -1)
            sides = np.concatenate([np.stack([placed[:, 0], nothing], 1), np.stack([nothing, placed[:, 1]], 1)])
            real = sides.max(axis=1) >= 0
            rows, inverse = np.unique(sides[real], axis=0, return_inverse=True)
            filled = np.full(len(sides), -1)
            filled[real] = inverse.ravel()
            places = filled.reshape(2, -1).T
        kinds = _kinds(rows[:, 0], rows[:, 1])
        rooms = [min(positions, layout.max_tokens or positions) - layout.num_special for layout in (*alone, pair)]
        room = np.array(rooms)[kinds]
        queries = np.where(rows[:, 0] >= 0, np.minimum(_lengths(texts, rows[:, 0]), max_query_tokens), 0)
        queries = np.minimum(queries, np.where(kinds == PAIR, room - 1, room))
        docs = np.where(rows[:, 1] >= 0, np.minimum(_lengths(texts, rows[:, 1]), max_doc_tokens), 0)
        docs = np.minimum(docs, room - queries)
        lengths = np.stack([layout.row_lengths(queries + docs) for layout in (*alone, pair)])[
            kinds, np.arange(len(rows))
        ]
        order = np.lexsort((lengths, kinds))  # one layout a batch, then like lengths together
        places = np.where(placed >= 0, np.argsort(order)[places], -1)
        starts = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        kept = np.stack([queries, docs], axis=1)[order].astype(np.int64)
        return cls(texts, rows[order, 0], rows[order, 1], kept, starts, places, pair, *alone)

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.queries)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, special ones included."""
        return int(self.starts[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and of how they are laid out."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.texts.tokens, self.texts.offsets, self.queries, self.docs, self.kept):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr((self.pair, self.query, self.doc)).encode())
        return digest.hexdigest()

    def chunks(self, max_tokens: int) -> list[tuple[int, int]]:
        """Cut the rows into runs of one layout with at most `max_tokens` tokens when padded to the longest (or of one row)."""
        lengths = np.diff(self.starts)
        kinds = _kinds(self.queries, self.docs)
        cuts, first = [], 0
        for row in range(1, self.num_rows + 1):
            full = row < self.num_rows and ((row + 1 - first) * lengths[row] > max_tokens or kinds[row] != kinds[first])
            if row == self.num_rows or full:
                cuts.append((first, row))
                first = row
        return cuts

    def batch(self, first: int, last: int) -> TokenBatch:
        """Lay out rows `first` to `last`, all of one layout; their tokens are those of the flat axis from `starts[first]` on."""
        return self.take(np.arange(first, last))

    def take(self, rows: np.ndarray) -> TokenBatch:
        """Lay out some rows, all of one layout, in the order given."""
        store = cast(TokenStore, self.texts)  # lay_out reads `tokens` and `offsets`
        sides = [(store, self.queries[rows], self.kept[rows, 0]), (store, self.docs[rows], self.kept[rows, 1])]
        kind = self.kind(int(rows[0]))
        if kind == PAIR:
            return self.pair.lay_out(sides)
        return (self.query, self.doc)[kind].lay_out([sides[kind]])

    @property
    def kinds(self) -> np.ndarray:
        """What each row holds: 0 a query by itself, 1 a doc by itself, 2 both; int64 [rows]."""
        return _kinds(self.queries, self.docs)

    def kind(self, row: int) -> int:
        """What a row holds: 0 a query by itself, 1 a doc by itself, 2 both."""
        return int(_kinds(self.queries[row : row + 1], self.docs[row : row + 1])[0])

    def tokens_of(self, pair: int, span: Span) -> tuple[int, int] | None:
        """Where a span's tokens are in the flat axis; None if truncation cut one of them or the span has none."""
        side = 0 if span.side == "query" else 1
        row = self.places[pair, side]
        if row < 0:
            return None
        kind = self.kind(row)
        layout = (self.query, self.doc, self.pair)[kind]
        before = len(layout.specials[0])
        if kind == PAIR and side == 1:
            before += int(self.kept[row, 0]) + len(layout.specials[1])
        kept = int(self.kept[row, side])
        text = int((self.queries, self.docs)[side][row])
        first, last = (
            (0, kept) if span.start is None or span.end is None else self.texts.tokens_of(text, span.start, span.end)
        )
        if first >= last or last > kept:
            return None
        start = int(self.starts[row]) + before
        return start + first, start + last


def within_spans(spans: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """Which tokens of the flat axis lie in a span, bool [num_tokens].

    Args:
        spans: First and one past last token, int64 [..., 2] each.
        num_tokens: Length of the axis.
    """
    opened = np.zeros(num_tokens + 1, dtype=np.int64)
    for own in spans:
        np.add.at(opened, own[..., 0].ravel(), 1)
        np.add.at(opened, own[..., 1].ravel(), -1)
    return opened.cumsum()[:-1] > 0


def _kinds(queries: np.ndarray, docs: np.ndarray) -> np.ndarray:
    return np.where(queries < 0, 1, np.where(docs < 0, 0, PAIR))


def _lengths(texts: OffsetTexts, rows: np.ndarray) -> np.ndarray:
    return texts.lengths[np.maximum(rows, 0)]
