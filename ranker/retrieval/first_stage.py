"""The first stage: BM25 candidates to re-rank, which are also the baseline of every report; cached in files."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.query_docs import has_own_id
from ranker.errors import DataError
from ranker.files.checksums import zip_fault
from ranker.files.folders import remove_partial
from ranker.files.writing import write_whole
from ranker.processes import available_cores
from ranker.retrieval.bm25 import BM25, warn_of_no_words
from ranker.retrieval.words import Words

log = logging.getLogger(__name__)

WORDS = 1  # version of `Words`, part of the cache's key; raise it when `Words` splits texts in another way


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
