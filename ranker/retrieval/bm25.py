"""BM25 without Java: the first stage whose candidates are re-ranked, and the baseline of every report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import numpy as np
from filelock import FileLock

from ranker.data.collection import Candidates, Collection, Docs, Splits
from ranker.errors import ConfigError, DataError
from ranker.files import remove_partial, write_whole, zip_fault

log = logging.getLogger(__name__)


_CHUNK_DOCS = 10_000


class _TokenIds:
    """Token ids of all docs, 4 bytes each, in the shape that bm25s wants: something with a length that gives lists."""

    def __init__(self, offsets: np.ndarray, flat: np.ndarray) -> None:
        self._offsets, self._flat = offsets, flat

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self._flat[self._offsets[row] : self._offsets[row + 1]].tolist() for row in range(len(self)))


class BM25:
    r"""BM25 over title and text, as Lucene computes it (Robertson et al., 1994; Kamphuis et al., 2020), scored by bm25s.

    .. math:: s(q, d) = \sum_{t \in q} \log\left(1 + \frac{N - n_t + 0.5}{n_t + 0.5}\right) \frac{f_{td}}{f_{td} + k_1 (1 - b + b |d| / \bar{|d|})}

    Args:
        docs: The corpus; only the index is kept in memory.
        k1: How slowly a term's repeats saturate.
        b: How strongly long docs are held back, 0 to 1.
        stemmer: Snowball stemmer by language, or None for whole words.
        stopwords: Stop word list of bm25s by language, or None.
        threads: Queries searched at a time.

    Raises:
        ConfigError: An unknown stemmer or stop word list.
    """

    def __init__(
        self,
        docs: Docs,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: str | None = "english",
        threads: int = 1,
    ) -> None:
        # bm25s and its progress bars are wanted here alone; a source that brings its candidates does not pay for the import.
        import bm25s
        import Stemmer

        logging.getLogger("bm25s").setLevel(logging.INFO)  # it sets itself to DEBUG
        if stemmer is not None and stemmer not in Stemmer.algorithms():
            raise ConfigError(f"bm25.stemmer: expected one of {', '.join(Stemmer.algorithms())} or null, got {stemmer!r}; set one of these")
        self._tokenize = partial(
            bm25s.tokenize, stopwords=stopwords, stemmer=None if stemmer is None else Stemmer.Stemmer(stemmer), show_progress=False
        )
        try:
            self._tokenize([""])
        except ValueError as error:
            raise ConfigError(
                f"bm25.stopwords: expected a language that bm25s has stop words for or null, got {stopwords!r}; set another"
            ) from error
        self._threads = threads
        ids: list[bytes] = []
        tokens, vocabulary = self._token_ids(docs, ids)
        self._doc_ids = np.array(ids, dtype=np.bytes_)
        self._id_places = np.empty(len(ids), dtype=np.int32)
        self._id_places[np.argsort(self._doc_ids, kind="stable")] = np.arange(len(ids), dtype=np.int32)
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", csc_backend="scipy") if vocabulary else None
        if self._index is not None:
            self._index.index(bm25s.tokenization.Tokenized(ids=tokens, vocab=vocabulary), show_progress=False)
            weights = self._index.scores["data"]
            bad = int((~np.isfinite(weights)).sum())
            if bad:
                raise DataError(
                    f"bm25: expected finite weights of words, got {bad} of {len(weights)} that are not; check k1={k1} and b={b}"
                )

    @property
    def num_docs(self) -> int:
        """Number of docs."""
        return len(self._doc_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the index in memory."""
        arrays = [] if self._index is None else [part for part in self._index.scores.values() if isinstance(part, np.ndarray)]
        return sum(part.nbytes for part in arrays) + self._doc_ids.nbytes

    def _token_ids(self, docs: Docs, ids: list[bytes]) -> tuple[_TokenIds, dict[str, int]]:
        """Tokenize chunk by chunk, so that no more than a chunk is ever there as Python lists; doc ids are added to `ids`."""
        vocabulary: dict[str, int] = {}
        parts: list[np.ndarray] = []
        lengths = array("i")
        remaining = iter(docs)
        while chunk := list(islice(remaining, _CHUNK_DOCS)):
            ids.extend(doc.doc_id.encode() for doc in chunk)
            tokens = self._tokenize([doc.full_text for doc in chunk])
            place = np.empty(len(tokens.vocab), dtype=np.int32)
            for word, number in tokens.vocab.items():
                place[number] = vocabulary.setdefault(word, len(vocabulary))
            lengths.extend(map(len, tokens.ids))
            parts.append(place[np.fromiter(chain.from_iterable(tokens.ids), dtype=np.int32)])
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
        return _TokenIds(offsets, np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)), vocabulary

    def search(self, queries: dict[str, str], depth: int) -> Candidates:
        """Return each query's best docs; a doc without any of the query's words is none of them.

        Equal scores are ordered as trec_eval orders them, by doc id descending, also where `depth` cuts through them.
        """
        words = self._tokenize(list(queries.values()), return_ids=False)  # all at once: a Snowball stemmer is not thread-safe
        with ThreadPoolExecutor(self._threads) as pool:
            best = list(pool.map(partial(self._best, depth=depth), words))
        offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in best])]).astype(np.int64)
        rows = np.concatenate([rows for rows, _ in best] or [np.empty(0, dtype=np.int64)])
        scores = np.concatenate([scores for _, scores in best] or [np.empty(0, dtype=np.float32)])
        return Candidates(list(queries), offsets, self._doc_ids[rows], scores)

    def _best(self, words: list[str], depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores of the best docs, best first."""
        if not words or self._index is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        scores = self._index.get_scores(words)
        rows = np.flatnonzero(scores > 0)  # twelve times as fast as on the floats themselves
        if len(rows) > depth:
            # All docs that tie with the last place take part in the sort, so that the cut follows the tie rule.
            rows = rows[scores[rows] >= np.partition(scores[rows], -depth)[-depth]]
        rows = rows[np.lexsort((self._id_places[rows], scores[rows]))[::-1][:depth]]
        return rows, scores[rows]


def first_stage(
    collection: Collection,
    depth: int,
    cache_dir: str | Path,
    k1: float = 0.9,
    b: float = 0.4,
    threads: int | None = None,
    indexes: dict[str, BM25] | None = None,
) -> Candidates:
    """BM25 candidates for all queries of a collection, made once and kept in `cache_dir`.

    The file's name is a hash of docs, queries and settings, so nothing stale is ever read. It appears whole or not at all, and of
    several processes one makes it while the others wait.

    Args:
        collection: Docs and queries; its candidates, if any, are not looked at.
        depth: Docs per query.
        cache_dir: Folder of cached files; made if missing.
        k1: See BM25.
        b: See BM25.
        threads: Queries searched at a time; None: one per processor.
        indexes: Indexes made so far with these settings, by docs fingerprint; a new one is added.
    """
    path = Path(cache_dir) / "bm25" / f"{_key(collection, depth, k1, b)}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        found = _read(path, list(collection.queries))
        if found is not None:
            return found
        indexes = {} if indexes is None else indexes
        fingerprint = collection.docs.fingerprint
        if fingerprint not in indexes:
            log.info("BM25: indexing %d docs for %s", len(collection.docs), collection.name)
            indexes[fingerprint] = BM25(collection.docs, k1=k1, b=b, threads=threads or os.cpu_count() or 1)
        log.info("BM25: searching the best %d docs for %d queries of %s", depth, len(collection.queries), collection.name)
        made = indexes[fingerprint].search(collection.queries, depth)
        _write(path, made)
        return made


def with_candidates(splits: Splits, depth: int, cache_dir: str | Path, k1: float = 0.9, b: float = 0.4) -> Splits:
    """Fill in BM25 candidates where a split has none; a training set with triples needs none. A corpus is indexed once at most.

    Raises:
        DataError: BM25 finds nothing for any query of a split.
    """
    indexes: dict[str, BM25] = {}

    def fill(collection: Collection) -> Collection:
        if collection.candidates is not None or collection.triples is not None:
            return collection
        candidates = first_stage(collection, depth, cache_dir, k1, b, indexes=indexes)
        if collection.queries and not len(candidates.doc_ids):
            raise DataError(
                f"{collection.name}: expected queries that share words with the docs, got none of {len(collection.queries)} for which BM25 "
                "finds a doc; check that queries and docs belong together, or give candidates as a run"
            )
        return replace(collection, candidates=candidates)

    return replace(
        splits,
        train=None if splits.train is None else fill(splits.train),
        val=None if splits.val is None else fill(splits.val),
        tests={name: fill(collection) for name, collection in splits.tests.items()},
    )


def _key(collection: Collection, depth: int, k1: float, b: float) -> str:
    settings = {
        "docs": collection.docs.fingerprint,
        "depth": depth,
        "k1": k1,
        "b": b,
        "bm25s": version("bm25s"),
        "stemmer": version("PyStemmer"),
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
