"""Training triples: groups of two docs, and a memory-mapped file of store rows that processes and runs share."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock

from ranker.data.collection import Collection
from ranker.data.token_store import TokenStore
from ranker.data.token_writer import map_array
from ranker.errors import DataError
from ranker.files.checksums import checksum, verify
from ranker.files.folders import remove_partial
from ranker.files.writing import write_whole
from ranker.hashing import digest

log = logging.getLogger(__name__)

_ROW = 3 * 4  # number of bytes of a triple


class TripleGroups:
    """One group per training triple (query, more relevant doc, less relevant doc); the docs are not drawn.

    Args:
        rows: Row of the query and rows of the two docs of each triple, int32 [triples, 3]; may be a mapped file.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.query_rows, self._docs = rows[:, 0], rows[:, 1:]

    def __len__(self) -> int:
        return len(self.query_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG002
        """Return the triples' doc rows [groups, 2] with the labels 1 and 0; every epoch has the same triples."""
        rows = self._docs[groups].astype(np.int64)
        return rows, np.tile(np.array([1.0, 0.0], dtype=np.float32), (len(groups), 1))

    def fingerprint(self) -> str:
        """Return the number of triples and a hash of every n-th triple.

        n is the number of triples divided by 10,000, rounded down, and at least 1. A part of the triples is hashed,
        because the file may be larger than memory.
        """
        every = max(1, len(self) // 10_000)
        return f"{len(self)} {digest(self.query_rows[::every], self._docs[::every])}"


def triple_rows(
    collection: Collection, queries: TokenStore, docs: TokenStore, cache_dir: Path, chunk: int = 1_000_000
) -> np.ndarray:
    """Return the store rows of (query, more relevant doc, less relevant doc), int32 [triples, 3].

    Triples with a `fingerprint` are looked up once and cached in a file: 12 bytes per triple, 4.8 GB for MS MARCO's 397
    million. Only the pages that a step reads are loaded into memory. One process writes the file while other processes
    wait, and the file appears complete or not at all. Triples without a fingerprint are looked up in memory.

    Args:
        collection: A collection with triples.
        queries: Token store of the queries.
        docs: Token store of the docs.
        cache_dir: Folder of the file.
        chunk: Number of triples that are looked up at a time.

    Raises:
        DataError: There are no triples, a triple names a query or doc that is not in the stores, or the file is
            damaged.
    """
    assert collection.triples is not None
    fingerprint = getattr(collection.triples, "fingerprint", None)
    if fingerprint is None:
        rows = np.concatenate([*_looked_up(collection.triples, queries, docs, chunk), np.empty((0, 3), dtype=np.int32)])
    else:
        key = repr((fingerprint, queries.folder.name, docs.folder.name)).encode()
        path = cache_dir / f"triples-{hashlib.blake2b(key, digest_size=10).hexdigest()}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                log.info("%s: looking up the training triples, once", collection.name)
                _write(path, _looked_up(collection.triples, queries, docs, chunk))
        _check(path)
        rows = map_array(path, "<i4").reshape(-1, 3)
    if not len(rows):
        raise DataError(f"{collection.name}: expected training triples, got none")
    return rows


def _looked_up(
    triples: Iterable[tuple[str, str, str]], queries: TokenStore, docs: TokenStore, chunk: int
) -> Iterator[np.ndarray]:
    blocks = getattr(triples, "id_arrays", lambda: None)()
    if blocks is not None:
        for query_ids, more, less in blocks:
            yield np.stack([queries.rows(query_ids), docs.rows(more), docs.rows(less)], axis=1).astype("<i4")
        return
    remaining = iter(triples)
    while part := list(islice(remaining, chunk)):
        query_ids, more, less = zip(*part, strict=True)
        yield np.stack([queries.rows(query_ids), docs.rows(more), docs.rows(less)], axis=1).astype("<i4")


def _write(path: Path, parts: Iterable[np.ndarray]) -> None:
    remove_partial(path)  # a killed process has left this file, because the caller holds the lock
    with write_whole(path, binary=True) as file:
        for part in parts:
            file.write(part.tobytes())
    with write_whole(path.with_suffix(".json")) as file:
        json.dump(checksum(path), file)


def _check(path: Path) -> None:
    """Compare the file with its checksum; for a file of an earlier version, without a checksum, check the size."""
    fix = f"the file is damaged; delete {path}, and the next run will rebuild it"
    sum_path = path.with_suffix(".json")
    if path.stat().st_size % _ROW:
        raise DataError(f"{path}: expected a multiple of {_ROW} bytes, got {path.stat().st_size}; {fix}")
    if sum_path.is_file():
        try:
            stored = json.loads(sum_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{sum_path}: expected a readable checksum, got {error}; {fix}") from error
        verify(path.parent, {path.name: stored}, fix)
