"""Windows over long docs: decide which tokens of a doc are in each row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.data.ragged import ranges, row_offsets
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError

SELECTIONS = ("first", "bm25")
K1, B = 0.9, 0.4  # parameters of BM25 within a doc, with the values of conf/model/bm25.yaml


@dataclass(frozen=True)
class Windows:
    """How a doc is cut into windows: window j has at most `length` tokens of the doc, from token `j * stride` on.

    The first window that reaches the end of the doc is the last one, so no window lies within another window. A doc
    with at most `length` tokens, even a doc without tokens, has one window.

    Args:
        length: Number of tokens of a window; special tokens, prompts and a repeated title are not counted.
        stride: Number of tokens between the starts of two windows; None: `length`.
        most: Largest number of windows of a doc; None: no limit.
        title: Every window except the first starts with the doc's title, cut to this many tokens; 0: no window has the
            title.
        select: Which windows are kept if a doc has more than `most`: `first`, or `bm25` (the windows with the highest
            BM25 scores within the doc, in reading order, see `best_windows`).

    Raises:
        ConfigError: A value is out of range, or the stride leaves out tokens between two windows.
    """

    length: int
    stride: int | None = None
    most: int | None = None
    title: int = 0
    select: str = "first"

    def __post_init__(self) -> None:
        for key, value, least in (
            ("length", self.length, 1),
            ("stride", self.step, 1),
            ("most", self.most, 1),
            ("title", self.title, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"passages.{key}: expected at least {least}, got {value}")
        if self.step > self.length:
            raise ConfigError(
                f"passages.stride: expected at most passages.length={self.length}, got {self.step}, which would "
                "leave out the tokens between two windows"
            )
        if self.select not in SELECTIONS:
            raise ConfigError(f"passages.select: expected one of {', '.join(SELECTIONS)}; got {self.select!r}")

    @property
    def step(self) -> int:
        """Number of tokens between the starts of two windows."""
        return self.length if self.stride is None else self.stride

    @property
    def reach(self) -> int | None:
        """Number of tokens in the first `most` windows of a doc; None: no limit, or the query selects the windows."""
        if self.most is None or self.select != "first":
            return None
        return (self.most - 1) * self.step + self.length

    def counts(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of windows of docs before `most` is applied, int64 [docs].

        Args:
            lengths: Number of tokens of each doc [docs].

        >>> Windows(4, 3).counts(np.array([0, 4, 5, 7, 8])).tolist()
        [1, 1, 2, 2, 3]
        """
        return 1 + np.maximum(-(-(lengths.astype(np.int64) - self.length) // self.step), 0)

    def sizes(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of windows kept of each doc, and the number of tokens in these windows, both int64 [docs].

        If BM25 selects windows, the number of tokens is an upper bound, because the last window of a doc may be
        shorter.

        Args:
            lengths: Tokens of each doc [docs].
        """
        counts = self.counts(lengths)
        tokens = lengths + (counts - 1) * (self.length - self.step)
        if self.most is None:
            return counts, tokens
        return np.minimum(counts, self.most), np.where(counts > self.most, self.most * self.length, tokens)

    def cut(self, lengths: np.ndarray, pairs: Pairs | None) -> Cut:
        """Cut docs into windows.

        Args:
            lengths: Tokens of each doc [docs].
            pairs: The docs and their queries, for the selection by BM25; None: there are no queries.
        """
        counts = self.counts(lengths)
        if self.most is not None and self.select == "first":
            counts = np.minimum(counts, self.most)
        starts = ranges(0, counts) * self.step
        kept = np.minimum(np.repeat(lengths, counts) - starts, self.length)
        if self.most is None or (counts <= self.most).all():
            return Cut(counts, starts, kept)
        assert pairs is not None  # `check_room` refuses this selection if queries are read separately
        chosen = np.ones(len(starts), dtype=bool)
        firsts = row_offsets(counts)
        for doc in np.flatnonzero(counts > self.most).tolist():
            part = slice(firsts[doc], firsts[doc + 1])
            best = best_windows(pairs.query(doc), pairs.doc(doc), starts[part], kept[part], self.most)
            chosen[part] = np.isin(np.arange(counts[doc]), best)
        return Cut(np.minimum(counts, self.most), starts[chosen], kept[chosen])


@dataclass(frozen=True)
class Cut:
    """The windows of docs, doc by doc in reading order.

    Args:
        counts: Number of windows of each doc, int64 [docs].
        starts: First token of each window, counted from the doc's first token, int64 [windows].
        lengths: Number of tokens of each window, int64 [windows].
    """

    counts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def docs(self) -> np.ndarray:
        """The doc of each window, int64 [windows]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


@dataclass(frozen=True)
class Pairs:
    """Docs and their queries in the token stores.

    Args:
        queries: Store of the queries.
        docs: Store of the docs.
        query_rows: Row of each doc's query [docs].
        query_lengths: Number of tokens kept of each doc's query, a prompt before the query included [docs].
        doc_rows: Row of each doc [docs].
        prefix_tokens: Number of prompt tokens before each query and before each doc of the stores.
    """

    queries: TokenStore
    docs: TokenStore
    query_rows: np.ndarray
    query_lengths: np.ndarray
    doc_rows: np.ndarray
    prefix_tokens: tuple[int, int] = (0, 0)

    def query(self, doc: int) -> np.ndarray:
        """Return the tokens of a doc's query, without a prompt."""
        return self.queries[int(self.query_rows[doc])][self.prefix_tokens[0] : int(self.query_lengths[doc])]

    def doc(self, doc: int) -> np.ndarray:
        """Return the tokens of a doc, without a prompt."""
        return self.docs[int(self.doc_rows[doc])][self.prefix_tokens[1] :]


def best_windows(query: np.ndarray, doc: np.ndarray, starts: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
    r"""Return the windows of a doc with the highest BM25 scores, ascending, int64 [count]; earlier windows win ties.

    Terms are token ids. Document frequencies and the average length are computed over the windows of this doc:

    .. math:: \sum_{t \in q} \ln\left(1 + \frac{n - n_t + 0.5}{n_t + 0.5}\right)
        \frac{f_t}{f_t + k_1 (1 - b + b\,l / \bar l)}

    Args:
        query: Token ids of the query.
        doc: Token ids of the doc.
        starts: First token of each window [windows].
        lengths: Number of tokens of each window [windows].
        count: Number of windows to return.
    """
    terms, weights = np.unique(query, return_counts=True)
    # count of each term before each position of the doc; the count in a window is the difference of two of these counts
    before = np.zeros((len(terms), len(doc) + 1), dtype=np.int64)
    np.cumsum(doc[None, :] == terms[:, None], axis=1, out=before[:, 1:])
    found = before[:, starts + lengths] - before[:, starts]
    containing = (found > 0).sum(axis=1)
    rarity = np.log1p((len(starts) - containing + 0.5) / (containing + 0.5))
    scores = (weights * rarity) @ (found / (found + K1 * (1 - B + B * lengths / lengths.mean())))
    return np.sort(np.argsort(-scores, kind="stable")[:count])
