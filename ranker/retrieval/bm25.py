"""BM25 in Python: the first stage whose candidates are re-ranked, and the baseline of every report."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Candidates, Collection, Docs, Splits
from ranker.data.query_docs import has_own_id
from ranker.errors import ConfigError, DataError
from ranker.files import remove_partial, write_whole, zip_fault
from ranker.processes import available_cores
from ranker.retrieval.word_weights import TFIDFWeights
from ranker.retrieval.words import Words, import_bm25s

log = logging.getLogger(__name__)

_CHUNK_DOCS = 10_000
VARIANTS = ("lucene", "robertson", "atire", "bm25l", "bm25+", "tfidf")
WORDS = 1  # version of `Words`, part of the cache's key; raise it when `Words` splits texts in another way


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
        variant: One of `VARIANTS`; `tfidf` is that of `TFIDF`.
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
            # kept apart, so that a score above 0 means a shared word
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
        """Return what a word of a query adds to the score of each doc."""
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
            raise DataError(f"explain: expected QUERY_ID,DOC_ID of the set, got no doc {doc_id!r}")
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


@dataclass(frozen=True)
class FirstStage:
    """Options of the first stage (`data.first_stage`): BM25 or TF-IDF; for their meaning see `BM25`."""

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = "english"
    stopwords: str | None = "english"
    min_word_chars: int = 1
    bigrams: bool = True
    variant: str = "lucene"
    delta: float = 0.5

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> FirstStage:
        """Return the options in a `data` node of a configuration."""
        return cls(**(data.get("first_stage") or {}))


def first_stage(
    collection: Collection,
    depth: int,
    cache_dir: str | Path,
    options: FirstStage = FirstStage(),
    threads: int | None = None,
    indexes: dict[str, BM25] | None = None,
) -> Candidates:
    """Return BM25 candidates for all queries of a collection, from the cache in `cache_dir` if possible.

    The name of the cache file is a hash of docs, queries and settings, so that outdated candidates are never read. The
    file appears complete or not at all. Of several processes, one searches while the others wait.

    Args:
        collection: Docs and queries; its own candidates are ignored.
        depth: Docs per query.
        cache_dir: Folder of cached files; created if missing.
        options: Options of the index and of the words.
        threads: Number of queries that are searched in parallel; None: one per processor.
        indexes: Docs fingerprint -> index with these options, to be reused; a new index is added.
    """
    path = Path(cache_dir) / "bm25" / f"{_key(collection, depth, options)}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        cached = _read(path, list(collection.queries))
        if cached is not None:
            _warn_again(collection, cached, options)
            return cached
        indexes = {} if indexes is None else indexes
        fingerprint = collection.docs.fingerprint
        if fingerprint not in indexes:
            log.info("BM25: indexing %d docs for %s", len(collection.docs), collection.name)
            indexes[fingerprint] = BM25(collection.docs, **asdict(options), threads=threads or available_cores())
        log.info(
            "BM25: searching the best %d docs for %d queries of %s", depth, len(collection.queries), collection.name
        )
        candidates = indexes[fingerprint].search(collection.queries, depth + collection.drop_query_docs)
        if collection.drop_query_docs:
            candidates = candidates.where(~has_own_id(candidates)).top(depth)
        _write(path, candidates)
        return candidates


def _warn_again(collection: Collection, cached: Candidates, options: FirstStage) -> None:
    """Repeat the warning that the search logged before its candidates were cached."""
    without = [query_id for query_id, count in zip(cached.query_ids, np.diff(cached.offsets), strict=True) if not count]
    if without:
        split = Words(options.stemmer, options.stopwords, options.min_word_chars, options.bigrams)
        words = split([collection.queries[query_id] for query_id in without])
        empty = {
            query_id: collection.queries[query_id] for query_id, stems in zip(without, words, strict=True) if not stems
        }
        if empty:
            warn_of_no_words(empty, len(collection.queries))


def with_candidates(splits: Splits, depth: int, cache_dir: str | Path, options: FirstStage = FirstStage()) -> Splits:
    """Add BM25 candidates to each split without candidates, except to a training set with triples or rows.

    A validation or test set that consists of rows gets the docs of its rows as candidates. A corpus is indexed at most
    once.

    Args:
        splits: The collections.
        depth: Docs per query.
        cache_dir: Folder of cached files.
        options: Options of the index and of the words.

    Raises:
        DataError: BM25 finds no doc for any query of a split.
    """
    indexes: dict[str, BM25] = {}

    def fill(collection: Collection) -> Collection:
        if collection.candidates is not None or collection.triples is not None:
            return collection
        if collection.rows is not None:
            return (
                collection
                if collection is splits.train
                else replace(collection, candidates=collection.rows.candidates())
            )
        candidates = first_stage(collection, depth, cache_dir, options, indexes=indexes)
        if collection.queries and not len(candidates.doc_ids):
            raise DataError(
                f"{collection.name}: expected queries that share words with the docs, got no BM25 result "
                f"for any of {len(collection.queries)} queries; check that queries and docs belong together, or give "
                "candidates as a run"
            )
        return replace(collection, candidates=candidates)

    return replace(
        splits,
        train=None if splits.train is None else fill(splits.train),
        val=None if splits.val is None else fill(splits.val),
        tests={name: fill(collection) for name, collection in splits.tests.items()},
    )


def _key(collection: Collection, depth: int, options: FirstStage) -> str:
    settings = {
        "docs": collection.docs.fingerprint,
        "depth": depth,
        "without query docs": collection.drop_query_docs,
        "options": asdict(options),
        "words": WORDS,
        **{package: version(package) for package in ("bm25s", "PyStemmer", "regex")},
    }
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for item in collection.queries.items():
        digest.update(repr(item).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read(path: Path, query_ids: list[str]) -> Candidates | None:
    if not path.exists():
        return None
    damage: object = zip_fault(path)
    if damage is None:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Candidates(query_ids, arrays["offsets"], arrays["doc_ids"], arrays["scores"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            damage = error
    log.warning("%s: expected a whole cache file, got %s; it is made anew", path, damage)
    return None


def _write(path: Path, candidates: Candidates) -> None:
    remove_partial(path)
    with write_whole(path, binary=True) as file:
        np.savez(file, offsets=candidates.offsets, doc_ids=candidates.doc_ids, scores=candidates.scores)
