"""BM25 in Python: an index over title and text, and its search."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from ranker.data.collection import Candidates, Docs
from ranker.errors import ConfigError, DataError
from ranker.retrieval.word_weights import TFIDFWeights
from ranker.retrieval.words import Words, import_bm25s

log = logging.getLogger(__name__)

_CHUNK_DOCS = 10_000
VARIANTS = ("lucene", "robertson", "atire", "bm25l", "bm25+", "tfidf")


class _TokenIds:
    """Word ids of all docs, 4 bytes each; with a length and an iterator over lists, as bm25s expects."""

    def __init__(self, offsets: np.ndarray, flat: np.ndarray) -> None:
        self.offsets, self.flat = offsets, flat

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self.flat[self.offsets[row] : self.offsets[row + 1]].tolist() for row in range(len(self)))


class BM25:
    r"""BM25 over title and text, computed by bm25s; by default in Lucene's variant.

    .. math:: s(q, d) = \sum_{t \in q} \log\left(1 + \frac{N - n_t + 0.5}{n_t + 0.5}\right)
        \frac{f_{td}}{f_{td} + k_1 (1 - b + b |d| / \bar{|d|})}

    Source: Robertson et al., 1994; Kamphuis et al., 2020 (the variants).

    Args:
        docs: The corpus; only the index stays in memory.
        k1: Term frequency saturation; higher values saturate more slowly.
        b: Strength of the length normalization, 0 to 1.
        stemmer: Snowball stemmer by language; None: no stemming.
        stopwords: Stop word list of bm25s by language; None: no stop words.
        min_word_chars: Shorter words of queries and docs are dropped.
        bigrams: Whether Chinese, Japanese, Korean, Thai ... are indexed as pairs of characters and single characters
            (`ranker.retrieval.words`).
        threads: Number of queries that are searched in parallel.
        variant: One of `VARIANTS`; `tfidf` weighs words as the scorer `TFIDF` does.
        delta: Lower bound of a word's weight in a doc that has it, for `bm25l` and `bm25+`.

    Raises:
        ConfigError: An unknown variant, stemmer or stop word list, or `min_word_chars` below 1.
        DataError: A weight is not finite.
    """

    def __init__(
        self,
        docs: Docs,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: str | None = "english",
        min_word_chars: int = 1,
        bigrams: bool = True,
        threads: int = 1,
        variant: str = "lucene",
        delta: float = 0.5,
    ) -> None:
        if variant not in VARIANTS:
            raise ConfigError(f"bm25.variant: expected one of {', '.join(VARIANTS)}; got {variant!r}")
        self._words = Words(stemmer, stopwords, min_word_chars, bigrams)
        self._threads = threads
        self._reported: set[str] = set()  # ids of queries without words, which `search` has warned of
        ids: list[bytes] = []
        tokens, vocabulary = self._token_ids(docs, ids)
        self._doc_ids = np.array(ids, dtype=np.bytes_)
        self._id_ranks = np.empty(len(ids), dtype=np.int32)
        self._id_ranks[np.argsort(self._doc_ids, kind="stable")] = np.arange(len(ids), dtype=np.int32)
        self._vocabulary = vocabulary
        self._index: Any = None
        # what a query word adds to the score of each doc without it (bm25l, bm25+), [words]
        self._floor: np.ndarray | None = None
        if vocabulary and variant == "tfidf":
            self._index = TFIDFWeights(tokens.offsets, tokens.flat, vocabulary)
        elif vocabulary:
            index = _bm25s_index(tokens, vocabulary, variant, k1=k1, b=b, delta=delta)
            # without the floor, a score above 0 in the index means that doc and query share a word
            self._floor, index.nonoccurrence_array = index.nonoccurrence_array, None
            self._index = index
            weights = self._index.scores["data"]
            bad = int((~np.isfinite(weights)).sum())
            if bad:
                raise DataError(
                    f"bm25: expected finite weights of words, got {bad} of {len(weights)} that are not; "
                    f"check k1={k1} and b={b}"
                )

    @property
    def num_docs(self) -> int:
        """Number of docs."""
        return len(self._doc_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the index in memory, in bytes."""
        parts = [] if self._index is None else self._index.scores.values()
        return sum(part.nbytes for part in parts if isinstance(part, np.ndarray)) + self._doc_ids.nbytes

    def _token_ids(self, docs: Docs, ids: list[bytes]) -> tuple[_TokenIds, dict[str, int]]:
        """Split docs chunk by chunk, to hold at most one chunk as Python lists; append doc ids to `ids`.

        Returns:
            The word ids of all docs, and the id of each word.
        """
        vocabulary: dict[str, int] = {}
        parts: list[np.ndarray] = []
        lengths = array("i")
        remaining = iter(docs)
        while chunk := list(islice(remaining, _CHUNK_DOCS)):
            ids.extend(doc.doc_id.encode() for doc in chunk)
            words = self._words([doc.full_text for doc in chunk])
            lengths.extend(map(len, words))
            word_ids = (vocabulary.setdefault(word, len(vocabulary)) for word in chain.from_iterable(words))
            parts.append(np.fromiter(word_ids, dtype=np.int32))
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
        return _TokenIds(offsets, np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)), vocabulary

    def search(self, queries: Mapping[str, str], depth: int) -> Candidates:
        """Return the best docs of each query, among docs that share a word with the query.

        Equal scores are in trec_eval's order, by descending doc id. This order also decides ties at rank `depth`.

        Args:
            queries: Text by query id.
            depth: Docs per query.
        """
        words = self._words(list(queries.values()))
        empty = {query_id: queries[query_id] for query_id, stems in zip(queries, words, strict=True) if not stems}
        if empty.keys() - self._reported:
            warn_of_no_words(empty, len(queries))
            self._reported.update(empty)
        with ThreadPoolExecutor(self._threads) as pool:
            best = list(pool.map(partial(self._best, depth=depth), words))
        offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in best])]).astype(np.int64)
        rows = np.concatenate([rows for rows, _ in best] or [np.empty(0, dtype=np.int64)])
        scores = np.concatenate([scores for _, scores in best] or [np.empty(0, dtype=np.float32)])
        return Candidates(list(queries), offsets, self._doc_ids[rows], scores)

    def _best(self, words: list[str], depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows, int64 [docs], and scores, float32 [docs], of the best docs, best first."""
        if not words or self._index is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        scores = self._index.get_scores(words)
        rows = np.flatnonzero(scores > 0)  # twelve times as fast as flatnonzero(scores)
        if len(rows) > depth:
            # keep all docs that tie with the one at rank `depth`; the sort below cuts them by doc id
            rows = rows[scores[rows] >= np.partition(scores[rows], -depth)[-depth]]
        rows = rows[np.lexsort((self._id_ranks[rows], scores[rows]))[::-1][:depth]]
        return rows, scores[rows] + np.float32(sum(map(self._floor_of, words)))

    def _floor_of(self, word: str) -> float:
        """Return the score that a doc gets for a word that it lacks; the index stores weights above it."""
        return (
            float(self._floor[self._vocabulary[word]]) if self._floor is not None and word in self._vocabulary else 0.0
        )

    def explain(self, query: str, doc_id: str) -> list[tuple[str, float, float]]:
        """Return the words that make a doc's score: word, its count in the query, its weight, largest product first.

        Args:
            query: The text of the query.
            doc_id: The doc.

        Raises:
            DataError: There is no such doc.
        """
        row = np.flatnonzero(self._doc_ids == doc_id.encode())
        if not len(row):
            raise DataError(
                f"explain: expected a query id and a doc id that one set contains; not found: doc {doc_id!r}"
            )
        counts = Counter(word for word in self._words([query])[0] if word in self._vocabulary)
        parts = [] if self._index is None else [
            (word, float(count), float(self._index.get_scores([word])[row[0]]) + self._floor_of(word))
            for word, count in counts.items()
        ]  # fmt: skip
        return sorted((part for part in parts if part[2] > 0), key=lambda part: -part[1] * part[2])


def _bm25s_index(tokens: _TokenIds, vocabulary: dict[str, int], variant: str, **options: float) -> Any:
    """Return bm25s' index of docs.

    Args:
        tokens: The word ids of each doc.
        vocabulary: The id of each word.
        variant: One of `VARIANTS`.
        options: `k1`, `b` and `delta`.
    """
    bm25s = import_bm25s()  # imported here: data that comes with candidates does not need this package
    logging.getLogger("bm25s").setLevel(logging.INFO)  # it sets itself to DEBUG
    index = bm25s.BM25(method=variant, csc_backend="scipy", **options)
    index.index(bm25s.tokenization.Tokenized(ids=tokens, vocab=vocabulary), show_progress=False)
    return index


def warn_of_no_words(queries: dict[str, str], total: int) -> None:
    """Log queries that have no words to search for."""
    query_id, text = next(iter(queries.items()))
    log.warning(
        "BM25: %d of %d queries have no words but stop words, such as %r (%r), and so get no docs; the options in "
        "conf/model/bm25.yaml decide which words count",
        len(queries),
        total,
        query_id,
        text[:100],
    )
