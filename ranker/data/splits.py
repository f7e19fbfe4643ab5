"""Split the queries of a source without splits into train, validation and test; check the splits of any source."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ranker.data.collection import Collection, Splits, known_docs
from ranker.data.trec_lines import line_with
from ranker.errors import DataError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


def hash_order(query_ids: Iterable[str], seed: int) -> list[str]:
    """Sort ids by a seeded hash of each id; the result is the same on every machine and for every input order.

    >>> hash_order(["1", "01", "001"], seed=0) == hash_order(["001", "1", "01"], seed=0)
    True
    """
    return sorted(
        query_ids,
        key=lambda query_id: (hashlib.blake2b(f"{seed}:{query_id}".encode(), digest_size=8).digest(), query_id),
    )


def split_queries(
    query_ids: Iterable[str], val_fraction: float, test_fraction: float, seed: int
) -> dict[str, list[str]]:
    """Distribute queries over train, dev and test by hash; a part with a fraction above 0 gets at least one query.

    >>> {name: len(part) for name, part in split_queries(map(str, range(50)), 0.1, 0.2, seed=0).items()}
    {'test': 10, 'dev': 5, 'train': 35}
    """
    ordered = hash_order(query_ids, seed)
    num_test = _share(len(ordered), test_fraction)
    num_val = min(_share(len(ordered), val_fraction), len(ordered) - num_test)
    return {
        "test": ordered[:num_test],
        "dev": ordered[num_test : num_test + num_val],
        "train": ordered[num_test + num_val :],
    }


def _share(total: int, fraction: float) -> int:
    return min(total, max(1, round(total * fraction))) if fraction > 0 else 0


@dataclass(frozen=True)
class TriplesWithout:
    """Training triples without the triples of some queries; each iteration reads the triples again.

    Args:
        triples: (query_id, more relevant doc_id, less relevant doc_id), re-iterable.
        held_out: Queries whose triples are skipped.
    """

    triples: Iterable[tuple[str, str, str]]
    held_out: frozenset[str]

    @property
    def fingerprint(self) -> str | None:
        """Identity of these triples; None if `triples` has no fingerprint."""
        fingerprint = getattr(self.triples, "fingerprint", None)
        return None if fingerprint is None else f"{fingerprint} without {sorted(self.held_out)}"

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return (triple for triple in self.triples if triple[0] not in self.held_out)

    def id_arrays(self) -> Iterator[tuple[np.ndarray, ...]] | None:
        """Return the triples' ids in blocks of arrays; None if `triples` can't."""
        blocks = getattr(self.triples, "id_arrays", lambda: None)()
        held_out = np.array([query_id.encode() for query_id in self.held_out] or [b""], dtype=np.bytes_)
        if blocks is None:
            return None
        kept = ((block, ~np.isin(block[0], held_out)) for block in blocks)
        return (tuple(ids[mask] for ids in block) for block, mask in kept)


def take_queries(collection: Collection, query_ids: Iterable[str], name: str) -> Collection:
    """Return a collection with a new name and some of the queries, in the old order, without triples and rows."""
    wanted = set(query_ids)
    return replace(
        collection,
        name=name,
        queries={query_id: text for query_id, text in collection.queries.items() if query_id in wanted},
        qrels={query_id: judged for query_id, judged in collection.qrels.items() if query_id in wanted},
        triples=None,
        rows=None,
    )


def cut_validation(train: Collection, num_queries: int, seed: int) -> tuple[Collection, Collection]:
    """Move judged queries, chosen by hash, with their triples from train to a new validation set.

    Args:
        train: The training set.
        num_queries: Number of queries to move.
        seed: Seed of the hash.

    Returns:
        The remaining training set and the validation set.

    Raises:
        DataError: There are too few judged queries to have one in each set.
    """
    judged = [query_id for query_id in train.queries if query_id in train.qrels]
    if not 0 < num_queries < len(judged):
        raise DataError(
            f"{train.name}: expected more judged training queries than the {num_queries} to validate on, "
            f"got {len(judged)}; name a validation set, or validate on fewer"
        )
    chosen = hash_order(judged, seed)[:num_queries]
    rest = take_queries(train, set(train.queries) - set(chosen), train.name)
    triples = None if train.triples is None else TriplesWithout(train.triples, frozenset(chosen))
    log.info(
        "%s: no validation set: %d of %d judged queries are moved from training to a new one, chosen by a hash of "
        "their ids (seed %d)",
        train.name,
        num_queries,
        len(judged),
        seed,
    )
    return replace(rest, triples=triples), take_queries(train, chosen, "val")


def check_judged_docs(qrels: Qrels, collection: Collection, where: str) -> None:
    """Warn of judged docs that are not in the collection; they still count in the denominator of every measure.

    Args:
        qrels: The judgements.
        collection: The collection with the docs.
        where: Source of the judgements, for messages; if it is a file, the message names the line.

    Raises:
        DataError: The collection has none of the judged docs.
    """
    judged = {doc_id for docs in qrels.values() for doc_id in docs}
    lacking = sorted(doc_id for doc_id in judged if doc_id not in collection.docs)
    if judged and len(lacking) == len(judged):
        raise DataError(
            f"{_located(where, lacking[0])}: expected judgements of docs in the collection, got {len(judged)} unknown "
            f"ids such as {lacking[0]!r} (ids of the collection look like {next(iter(collection.docs)).doc_id!r}); "
            "use the qrels that belong to these docs"
        )
    if lacking:
        log.warning(
            "%s: %d of %d judged docs, such as %r, are not in the collection; they count as not found",
            where,
            len(lacking),
            len(judged),
            lacking[0],
        )


def _located(where: str, word: str) -> str:
    """Return `where`; if it is a file, with the number of the first line that has this id."""
    path = Path(where)
    return line_with(path, word) if path.is_file() else where


def check_candidates(collection: Collection, where: str) -> None:
    """Warn of judged queries without candidates, which count 0 in the evaluation.

    Args:
        collection: Queries, docs and candidates.
        where: Source of the candidates, for messages; if it is a file, the message names the line.

    Raises:
        DataError: A candidate is not in the collection, or no query has candidates.
    """
    candidates = collection.candidates
    if candidates is None or not collection.queries:
        return
    without = [query_id for query_id in collection.queries if not len(candidates.ids(query_id))]
    if len(without) == len(collection.queries):
        example = next(iter(candidates), None)
        raise DataError(
            f"{_located(where, example or '')}: expected candidates for the queries of {collection.name} (ids like "
            f"{without[0]!r}), got none (ids of the run look like {example!r}); use the run that belongs to these "
            "queries"
        )
    if without:
        log.warning("%s: %d of %d queries of %s have no candidates, such as %r; all measures are 0 for them",
                    where, len(without), len(collection.queries), collection.name, without[0])  # fmt: skip
    doc_ids = np.unique(np.concatenate([candidates.ids(query_id) for query_id in collection.queries]))
    unknown = doc_ids[~known_docs(collection.docs, doc_ids)]
    if len(unknown):
        doc_id = unknown[0].decode()
        raise DataError(
            f"{_located(where, doc_id)}: expected candidates from the collection, got the unknown doc id {doc_id!r}; "
            "use the run that belongs to these docs, or candidates=bm25"
        )


def check_disjoint(splits: Splits) -> None:
    """Refuse splits that share a query, because training on test queries makes every measure worthless.

    Two queries are the same if both id and text are equal. Different queries may have equal ids, for example if two
    collections number their queries from 1.

    Raises:
        DataError: Two splits share a query.
    """
    parts = [part for part in (splits.train, splits.val) if part is not None]
    for later, part in enumerate(parts + list(splits.tests.values())):
        for other in parts[:later]:
            shared = sorted(query_id for query_id, text in part.queries.items() if other.queries.get(query_id) == text)
            if shared:
                raise DataError(
                    f"{part.name}: expected queries that {other.name} lacks, got {len(shared)} that both have, "
                    f"such as {shared[0]!r}; remove them from one of the two"
                )
