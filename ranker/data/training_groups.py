"""Choose the training groups of a set: its triples, draws from its rows, or draws from judgements and candidates."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection
from ranker.data.judged_groups import JudgedGroups
from ranker.data.options import TrainDocs
from ranker.data.row_groups import RowGroups
from ranker.data.sampling import GroupOptions, GroupSampler
from ranker.data.splits import check_candidates
from ranker.data.trec import read_candidates, read_run
from ranker.data.triples import TripleGroups, triple_rows
from ranker.errors import ConfigError, DataError
from ranker.types import Run

log = logging.getLogger(__name__)


def takes_triples(collection: Collection, train_docs: TrainDocs) -> bool:
    """Return whether the training groups are the collection's triples."""
    return collection.triples is not None and not train_docs.teacher and not train_docs.negatives


def sampler_of(
    collection: Collection, collator: Collator, options: GroupOptions, train_docs: TrainDocs, cache_dir: Path
) -> GroupSampler:
    """Return the training groups of a collection.

    Args:
        collection: A training set.
        collator: The collator over its token stores.
        options: Size of a group and of its pools; triples ignore these options.
        train_docs: Sources of the docs and labels of groups.
        cache_dir: Folder for the rows of triples.

    Raises:
        ConfigError: Rows have a teacher's scores, and in-batch negatives are on.
        DataError: See `JudgedGroups`; or a run of negatives or of a teacher has other queries.
    """
    if takes_triples(collection, train_docs):
        if options.num_docs != 2 or options.positives != 1:
            log.info(
                "%s: a training group is a triple, one relevant doc and one other; batch.docs and batch.positives "
                "don't apply",
                collection.name,
            )
        return TripleGroups(triple_rows(collection, collator.queries, collator.docs, cache_dir))
    prompt_tokens = collator.prefix_tokens
    if collection.rows is not None and not train_docs.teacher and not train_docs.negatives:
        if collection.rows.scores is not None and train_docs.in_batch:
            raise ConfigError(
                "model.in_batch_negatives: expected false with rows that have a teacher's scores, "
                "and none for other queries' docs"
            )
        return RowGroups(collection.rows, collator.queries, collator.docs, options, collection.alike, prompt_tokens)
    return JudgedGroups(
        collection,
        collator.queries,
        collator.docs,
        options,
        _read_negatives(train_docs.negatives, collection) if train_docs.negatives else None,
        _read_teacher(train_docs.teacher, collection) if train_docs.teacher else None,
        prompt_tokens,
    )


def _read_negatives(path: str | Path, collection: Collection) -> Candidates:
    negatives = read_candidates(Path(path))
    check_candidates(replace(collection, candidates=negatives), str(path))
    return negatives


def _read_teacher(path: str | Path, collection: Collection) -> Run:
    teacher = read_run(Path(path), single=True)
    if not any(query_id in teacher for query_id in collection.qrels):
        raise DataError(
            f"{path}: expected a teacher's scores for the training queries (ids as "
            f"{next(iter(collection.qrels), None)!r}), got none (the run has ids as {next(iter(teacher), None)!r}); "
            "make it with evaluate.py split=train"
        )
    return teacher
