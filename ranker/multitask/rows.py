"""Auxiliary rows: query-doc pairs of the training set with labels of probing tasks, and the tokens that heads read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.scorer_inputs import TextLimits
from ranker.errors import ConfigError, DataError
from ranker.multitask.options import Head, TaskLabels
from ranker.probing.binning import fit_bins
from ranker.probing.examples import ProbeExample, ProbeTask
from ranker.probing.label_store import labelled_examples
from ranker.probing.pairs import sample_pairs
from ranker.probing.sequences import Sequences
from ranker.probing.spacy_model import forget

log = logging.getLogger(__name__)

# number of spans per target for a head with pooling=span; a target with one span gets an empty second span (0, 0)
MAX_SPANS = 2


@dataclass(frozen=True)
class AuxiliaryTask:
    """A probing task that is trained together with ranking.

    Args:
        head: Configuration of the task's head.
        task: The probing task.
        pooling: Pooling of the head: `cls`, `mean` or `span`.
    """

    head: Head
    task: ProbeTask
    pooling: str


@dataclass(frozen=True)
class TaskRows:
    """The labelled rows of a task.

    Args:
        name: Name of the head.
        rows: Row of each pair in `Sequences`, int64 [pairs].
        target_starts: Pair i has the targets `target_starts[i]` to `target_starts[i + 1] - 1`, int64 [pairs + 1].
        spans: Start (inclusive) and end (exclusive) of each token span that the head reads for a target, counted from
            the row's first token, int64 [targets, spans, 2]. For an unused span, start equals end.
        labels: Class (int64) or number (float32) of each target [targets].
    """

    name: str
    rows: np.ndarray
    target_starts: np.ndarray
    spans: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


def label_tasks(
    collection: Collection,
    tasks: Sequence[ProbeTask],
    options: TaskLabels,
    held_out: Mapping[str, Collection],
    seed: int,
    cache_dir: Path,
) -> list[list[ProbeExample]]:
    """Make the examples of each task from training queries only.

    Args:
        collection: The training queries, with candidates or triples.
        tasks: Probing tasks.
        options: Number of pairs.
        held_out: Validation and test sets, by name.
        seed: Seed of the draws.
        cache_dir: Folder of the cached labels.

    Raises:
        DataError: A labelled query is in a validation or test set, or a task has no example.
    """
    collection = _with_pairs(collection, options.max_pairs)
    sample = sample_pairs(collection, options.max_pairs, options.docs_per_query, options.depth, seed, 0.0, 0.0)
    all_examples = []
    for task in tasks:
        examples = [
            example for example in labelled_examples(task, sample, cache_dir) if example.part in (None, "train")
        ]
        if not examples:
            raise DataError(
                f"model.heads.{task.name}: expected examples of the training part, got none; take another data or task"
            )
        refuse_held_out(task.name, examples, collection, held_out)
        all_examples.append(examples[: options.max_pairs])
    forget()
    return all_examples


def _with_pairs(collection: Collection, max_pairs: int) -> Collection:
    """Return the collection; if it has triples but no candidates, candidates are added.

    The added candidates of a query are the docs of its triples among the first `max_pairs` triples.
    """
    if collection.candidates is not None or collection.triples is None:
        return collection
    docs: dict[str, dict[str, None]] = {}
    for query_id, positive_id, negative_id in islice(collection.triples, max_pairs):
        docs.setdefault(query_id, {}).update({positive_id: None, negative_id: None})
    return replace(
        collection,
        candidates=Candidates.from_lists((query_id, list(ids), [0.0] * len(ids)) for query_id, ids in docs.items()),
    )


def refuse_held_out(
    name: str, examples: Sequence[ProbeExample], train: Collection, held_out: Mapping[str, Collection]
) -> None:
    """Check that no validation or test query is labelled, because training on such labels makes measures worthless.

    Queries are compared by text. A labelled query is also compared by id, if no training query has this id and the
    held-out collection has the labelled doc.

    Args:
        name: Name of the task, for the message.
        examples: Labelled examples.
        train: The training queries.
        held_out: Validation and test sets, by name.

    Raises:
        DataError: A validation or test query is labelled; the message names one such query.
    """
    texts = {_normalised(example.query): example.query_id for example in examples if example.query.strip()}
    not_in_train = sorted(
        {(example.query_id, example.doc_id) for example in examples if example.query_id not in train.queries}
    )
    for split, collection in held_out.items():
        shared = [
            (query_id, texts[_normalised(text)], "text")
            for query_id, text in collection.queries.items()
            if _normalised(text) in texts
        ]
        shared += [
            (query_id, query_id, "id")
            for query_id, doc_id in not_in_train
            if query_id in collection.queries and doc_id in collection.docs
        ]
        if shared:
            held_out_id, labelled_id, what = shared[0]
            count = len({query_id for _, query_id, _ in shared})
            raise DataError(
                f"model.heads.{name}: expected labels on training queries only, got {count} queries of {split}, "
                f"such as {labelled_id!r} ({split}'s {held_out_id!r} has the same {what}); remove them from the labels "
                "or from the training queries"
            )


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def to_rows(
    tasks: Sequence[AuxiliaryTask], examples: Sequence[Sequence[ProbeExample]], tokenizer: Any, limits: TextLimits
) -> tuple[Sequences, list[TaskRows]]:
    """Tokenize the texts of all tasks, and find the tokens that each head reads.

    Args:
        tasks: The auxiliary tasks.
        examples: Examples of each task.
        tokenizer: A fast tokenizer.
        limits: Maximum text lengths in tokens; here, `limits.pair` must not be None.

    Raises:
        ConfigError: A head does not fit its task.
        DataError: Truncation removes all targets of a task.
    """
    assert limits.pair is not None
    texts = list(dict.fromkeys((example.query, example.doc) for of_task in examples for example in of_task))
    sequences = Sequences.of(texts, tokenizer, "pairs", limits.pair, limits.query, limits.doc)
    pair_of = {pair: number for number, pair in enumerate(texts)}
    rows = [_rows_of(task, of_task, sequences, pair_of) for task, of_task in zip(tasks, examples, strict=True)]
    return sequences, rows


def _rows_of(
    auxiliary: AuxiliaryTask,
    examples: Sequence[ProbeExample],
    sequences: Sequences,
    pair_of: dict[tuple[str, str], int],
) -> TaskRows:
    head, pooling = auxiliary.head, auxiliary.pooling
    rows, target_starts, spans, targets, num_cut = [], [0], [], [], 0
    num_spans = MAX_SPANS if pooling == "span" else 1
    for example in examples:
        pair = pair_of[example.query, example.doc]
        row = int(sequences.pair_rows[pair, 1])
        start, end = sequences.starts[row : row + 2].tolist()
        for target in example.targets:
            token_spans = [sequences.tokens_of(pair, span) for span in target.spans]
            if None in token_spans:
                num_cut += 1
                continue
            read: list[Any] = {"cls": [(start, start + 1)], "mean": [(start, end)]}.get(pooling, token_spans)
            spans.append(
                [(first - start, last - start) for first, last in [*read, *[(start, start)] * num_spans][:num_spans]]
            )
            targets.append(target)
        if len(targets) > target_starts[-1]:
            rows.append(row)
            target_starts.append(len(targets))
    if not targets:
        raise DataError(
            f"model.heads.{head.label}: expected at least one target that truncation leaves intact, got none in "
            f"{len(examples)} pairs; raise max_doc_tokens"
        )
    if num_cut:
        log.info(
            "%s: %d of %d targets are left out, since truncation cut them", head.label, num_cut, num_cut + len(targets)
        )
    labels = _labels(head, auxiliary.task, [target.value for target in targets], [target.label for target in targets])
    return TaskRows(head.label, np.array(rows), np.array(target_starts), np.array(spans, dtype=np.int64), labels)


def _labels(head: Head, task: ProbeTask, values: Sequence[float | None], names: Sequence[str | None]) -> np.ndarray:
    """Return the labels of a task's targets [targets].

    Regression labels are float32; they are clipped at two standard deviations from the mean, then scaled to [0, 1]. All
    other labels are classes, int64, for which numbers are binned.
    """
    numeric = all(value is not None for value in values)
    if head.regression and not numeric:
        raise ConfigError(
            f"model.heads.{head.label}.regression: expected a task of numbers, got {task.name}, whose labels are "
            "classes"
        )
    if numeric and head.classes is not None:
        raise ConfigError(
            f"model.heads.{head.label}.classes: expected none, since the targets of {task.name} have numbers; "
            "leave classes out"
        )
    if numeric:
        numbers = np.array(values, dtype=np.float64)
        if head.regression:
            return np.clip(0.25 * (numbers - numbers.mean()) / max(numbers.std(), 1e-12) + 0.5, 0, 1).astype(np.float32)
        return fit_bins(numbers, getattr(task, "bins", 10), getattr(task, "binning", "mean2std"))(numbers)
    classes = class_names(head, task)
    if classes is None:
        raise DataError(
            f"model.heads.{head.label}: expected every target of {task.name} to have a number, got one without"
        )
    index_of = {name: index for index, name in enumerate(classes)}
    unknown = sorted({str(name) for name in names} - set(index_of))
    if unknown:
        raise DataError(
            f"model.heads.{head.label}: expected one of the labels {', '.join(classes)}, got {unknown[0]!r}; "
            "add it to classes"
        )
    return np.array([index_of[str(name)] for name in names], dtype=np.int64)


def class_names(head: Head, task: ProbeTask) -> tuple[str, ...] | None:
    """Return the labels of a classification task; None if the task's targets are numbers.

    Raises:
        ConfigError: Neither the task nor the head lists the labels.
    """
    if head.classes is not None:
        return tuple(map(str, head.classes))
    if task.classes == ():
        return None
    if task.classes is None:
        raise ConfigError(
            f"model.heads.{head.label}.classes: expected the labels of {task.name}, whose set is open, got none; "
            "add classes: [A, B] to the head"
        )
    return task.classes


def num_classes(head: Head, task: ProbeTask) -> int:
    """Return the number of outputs of a classification head: the number of labels, or of bins for numbers."""
    names = class_names(head, task)
    return getattr(task, "bins", 10) if names is None else len(names)
