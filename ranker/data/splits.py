"""How queries come to be in train, validation or test where the data does not say, and what must hold of any source's splits."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ranker.data.collection import Collection, Splits
from ranker.data.trec import line_with
from ranker.errors import DataError

if TYPE_CHECKING:  # it imports torch, which reading data does not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


def hash_order(query_ids: Iterable[str], seed: int) -> list[str]:
    """Order ids by a seeded hash of each: the same on every machine, whatever order they come in.

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
    """Deal queries to train, dev and test by hash; a wanted part gets at least one query while there are any.

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
    """Training triples of all queries but some; read anew at each iteration.

    Args:
        triples: (query_id, more relevant doc_id, less relevant doc_id), re-iterable.
        held_out: Queries whose triples are passed over.
    """

    triples: Iterable[tuple[str, str, str]]
    held_out: frozenset[str]

    @property
    def fingerprint(self) -> str | None:
        """Which triples these are, if that is known."""
        whole = getattr(self.triples, "fingerprint", None)
        return None if whole is None else f"{whole} without {sorted(self.held_out)}"

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return (triple for triple in self.triples if triple[0] not in self.held_out)


def take_queries(collection: Collection, query_ids: Iterable[str], name: str) -> Collection:
    """The same corpus and candidates with some of the queries, in the collection's order; its triples are left out."""
    wanted = set(query_ids)
    return replace(
        collection,
        name=name,
        queries={query_id: text for query_id, text in collection.queries.items() if query_id in wanted},
        qrels={query_id: judged for query_id, judged in collection.qrels.items() if query_id in wanted},
        triples=None,
    )


def cut_validation(train: Collection, num_queries: int, seed: int) -> tuple[Collection, Collection]:
    """Move judged queries, chosen by hash, from train to a validation set; their triples leave the training set too.

    Raises:
        DataError: Too few judged queries to leave one on each side.
    """
    judged = [query_id for query_id in train.queries if query_id in train.qrels]
    if not 0 < num_queries < len(judged):
        raise DataError(
            f"{train.name}: expected more judged training queries than the {num_queries} to validate on, got {len(judged)}; "
            "name a validation set, or validate on fewer"
        )
    chosen = hash_order(judged, seed)[:num_queries]
    rest = take_queries(train, set(train.queries) - set(chosen), train.name)
    triples = None if train.triples is None else TriplesWithout(train.triples, frozenset(chosen))
    log.info(
        "%s: no validation set: %d of %d judged queries, by hash of their ids (seed %d), are taken out of training for it",
        train.name,
        num_queries,
        len(judged),
        seed,
    )
    return replace(rest, triples=triples), take_queries(train, chosen, "val")


def check_judged_docs(qrels: Qrels, collection: Collection, where: str) -> None:
    """Warn of judged docs that the collection lacks; they still count in every measure's denominator.

    Raises:
        DataError: Not one of them is in the collection.
    """
    judged = {doc_id for docs in qrels.values() for doc_id in docs}
    lacking = sorted(doc_id for doc_id in judged if doc_id not in collection.docs)
    if judged and len(lacking) == len(judged):
        raise DataError(
            f"{_located(where, lacking[0])}: expected judgements of docs in the collection, got {len(judged)} unknown ids as {lacking[0]!r} "
            f"(the collection has ids as {next(iter(collection.docs)).doc_id!r}); use the qrels that belong to these docs"
        )
    if lacking:
        log.warning(
            "%s: %d of %d judged docs are not in the collection, as %r; they count as not found",
            where,
            len(lacking),
            len(judged),
            lacking[0],
        )


def _located(where: str, word: str) -> str:
    """With the line that names an id, where `where` is a file."""
    path = Path(where)
    return line_with(path, word) if path.is_file() else where


def check_candidates(collection: Collection, where: str) -> None:
    """Warn of judged queries without candidates; each counts 0 in the evaluation.

    Raises:
        DataError: A candidate's text is not in the collection, or no query has candidates.
    """
    candidates = collection.candidates
    if candidates is None or not collection.queries:
        return
    without = [query_id for query_id in collection.queries if not len(candidates.ids(query_id))]
    if len(without) == len(collection.queries):
        example = next(iter(candidates), None)
        raise DataError(
            f"{_located(where, example or '')}: expected candidates for the queries of {collection.name} (ids as {without[0]!r}), got none "
            f"(the run has ids as {example!r}); use the run that belongs to these queries"
        )
    if without:
        log.warning("%s: %d of %d queries of %s have no candidates, as %r; each counts 0",
                    where, len(without), len(collection.queries), collection.name, without[0])  # fmt: skip
    wanted = [candidates.ids(query_id) for query_id in collection.queries]
    for doc_id in np.unique(np.concatenate(wanted)):
        if doc_id.decode() not in collection.docs:
            raise DataError(
                f"{_located(where, doc_id.decode())}: expected candidates from the collection, got the unknown doc id {doc_id.decode()!r}; "
                "use the run that belongs to these docs, or candidates=bm25"
            )


def check_disjoint(splits: Splits) -> None:
    """Refuse queries that two splits share: training on test queries makes every number worthless.

    Equal ids with unequal texts, as in collections that both number from 1, are different queries.

    Raises:
        DataError: Two splits share a query.
    """
    parts = [part for part in (splits.train, splits.val) if part is not None]
    for later, part in enumerate(parts + list(splits.tests.values())):
        for other in parts[:later]:
            shared = sorted(query_id for query_id, text in part.queries.items() if other.queries.get(query_id) == text)
            if shared:
                raise DataError(
                    f"{part.name}: expected queries that {other.name} lacks, got {len(shared)} shared ones, as {shared[0]!r}; "
                    "remove them from one of the two"
                )
