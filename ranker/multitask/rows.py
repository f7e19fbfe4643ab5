"""Auxiliary rows: pairs of training queries and docs with a probing task's labels, and the tokens that each label's head reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.errors import ConfigError, DataError
from ranker.multitask.options import Head, TaskLabels
from ranker.probing.binning import fit_bins
from ranker.probing.examples import ProbeExample, ProbeTask
from ranker.probing.label_store import labelled_examples
from ranker.probing.pairs import sample_pairs
from ranker.probing.sequences import Sequences
from ranker.probing.spacy_model import forget

log = logging.getLogger(__name__)

SLOTS = 2  # spans that a head with span pooling reads; a target of one span leaves the second part 0


@dataclass(frozen=True)
class TaskRows:
    """A task's labelled rows.

    Args:
        name: Name of the head.
        rows: Row of each pair in `Sequences`, int64 [pairs].
        targets: Pair i has the targets `targets[i]` to `targets[i + 1]`, int64 [pairs + 1].
        spans: Tokens of each part that a target's head reads, from and to, counted from the row's first token; equal
            where there is no part, int64 [targets, parts, 2].
        labels: Class (int64) or number (float32) of each target.
    """

    name: str
    rows: np.ndarray
    targets: np.ndarray
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
    """Make the examples of each task, of training queries only.

    Args:
        collection: The training queries, with candidates or triples.
        tasks: Probing tasks.
        options: How many pairs.
        held_out: Every collection that is evaluated on, by name.
        seed: Seed of the draws.
        cache_dir: Where labels are kept.

    Raises:
        DataError: A query is evaluated on as well, or a task has no example.
    """
    collection = _with_pairs(collection, options.max_pairs)
    sample = sample_pairs(collection, options.max_pairs, options.docs_per_query, options.depth, seed, 0.0, 0.0)
    found = []
    for task in tasks:
        examples = [
            example for example in labelled_examples(task, sample, cache_dir) if example.part in (None, "train")
        ]
        if not examples:
            raise DataError(
                f"model.heads.{task.name}: expected examples of the training part, got none; take another data or task"
            )
        refuse_held_out(task.name, examples, collection, held_out)
        found.append(examples[: options.max_pairs])
    forget()
    return found


def _with_pairs(collection: Collection, max_pairs: int) -> Collection:
    """The collection with candidates; where it has triples only, the docs of the first `max_pairs` triples."""
    if collection.candidates is not None or collection.triples is None:
        return collection
    docs: dict[str, dict[str, None]] = {}
    for query_id, more, less in islice(collection.triples, max_pairs):
        docs.setdefault(query_id, {}).update({more: None, less: None})
    return replace(
        collection,
        candidates=Candidates.from_lists((query_id, list(own), [0.0] * len(own)) for query_id, own in docs.items()),
    )


def refuse_held_out(
    name: str, examples: Sequence[ProbeExample], train: Collection, held_out: Mapping[str, Collection]
) -> None:
    """Refuse labels on queries that are evaluated on: what a model learns of them would make its measures worthless.

    They are known by their texts; by their ids as well where no training query has the id and the doc's is one of the
    evaluated docs.

    Raises:
        DataError: There are such queries; the message names one.
    """
    texts = {_same(example.query): example.query_id for example in examples if example.query.strip()}
    brought = sorted(
        {(example.query_id, example.doc_id) for example in examples if example.query_id not in train.queries}
    )
    for part, collection in held_out.items():
        shared = [
            (query_id, texts[_same(text)], "text")
            for query_id, text in collection.queries.items()
            if _same(text) in texts
        ]
        shared += [
            (own, own, "id") for own, doc_id in brought if own in collection.queries and doc_id in collection.docs
        ]
        if shared:
            theirs, own, what = shared[0]
            count = len({own for _, own, _ in shared})
            raise DataError(
                f"model.heads.{name}: expected labels on training queries only, got {count} queries of {part}, as {own!r} "
                f"({part}'s {theirs!r} has the same {what}); remove them from the labels or from the training queries"
            )


def _same(text: str) -> str:
    return " ".join(text.casefold().split())


def to_rows(
    heads: Sequence[Head], tasks: Sequence[ProbeTask], examples: Sequence[Sequence[ProbeExample]], poolings: Sequence[str],
    tokenizer: Any, positions: int, max_query_tokens: int, max_doc_tokens: int,
) -> tuple[Sequences, list[TaskRows]]:  # fmt: skip
    """Tokenize all tasks' texts and find what each head reads.

    Args:
        heads: The heads.
        tasks: The task of each.
        examples: Examples of each task.
        poolings: Pooling of each head.
        tokenizer: A fast tokenizer.
        positions: Longest row.
        max_query_tokens: Longest query.
        max_doc_tokens: Longest doc.

    Raises:
        ConfigError: A head does not fit its task.
        DataError: Truncation leaves a task nothing.
    """
    texts = list(dict.fromkeys((example.query, example.doc) for own in examples for example in own))
    sequences = Sequences.of(texts, tokenizer, "pairs", positions, max_query_tokens, max_doc_tokens)
    place_of = {pair: place for place, pair in enumerate(texts)}
    made = [
        _rows_of(head, task, own, pooling, sequences, place_of)
        for head, task, own, pooling in zip(heads, tasks, examples, poolings, strict=True)
    ]
    return sequences, made


def _rows_of(
    head: Head,
    task: ProbeTask,
    examples: Sequence[ProbeExample],
    pooling: str,
    sequences: Sequences,
    place_of: dict[tuple[str, str], int],
) -> TaskRows:
    rows, ends, spans, targets, cut = [], [0], [], [], 0
    parts = SLOTS if pooling == "span" else 1
    for example in examples:
        pair = place_of[example.query, example.doc]
        row = int(sequences.pair_rows[pair, 1])
        start, end = sequences.starts[row : row + 2].tolist()
        for target in example.targets:
            found = [sequences.tokens_of(pair, span) for span in target.spans]
            if None in found:
                cut += 1
                continue
            read: list[Any] = {"cls": [(start, start + 1)], "mean": [(start, end)]}.get(pooling, found)
            spans.append([(first - start, last - start) for first, last in [*read, *[(start, start)] * parts][:parts]])
            targets.append(target)
        if len(targets) > ends[-1]:
            rows.append(row)
            ends.append(len(targets))
    if not targets:
        raise DataError(
            f"model.heads.{head.label}: expected targets, got none of {len(examples)} pairs that truncation left whole; raise max_doc_tokens"
        )
    if cut:
        log.info("%s: %d of %d targets are left out, since truncation cut them", head.label, cut, cut + len(targets))
    labels = _labels(head, task, [target.value for target in targets], [target.label for target in targets])
    return TaskRows(head.label, np.array(rows), np.array(ends), np.array(spans, dtype=np.int64), labels)


def _labels(head: Head, task: ProbeTask, values: Sequence[float | None], names: Sequence[str | None]) -> np.ndarray:
    """Classes int64, or numbers float32 clipped at two standard deviations about their mean and scaled to 0 to 1."""
    numeric = all(value is not None for value in values)
    if head.regression and not numeric:
        raise ConfigError(
            f"model.heads.{head.label}.regression: expected a task of numbers, got {task.name}, whose labels are classes"
        )
    if numeric and head.classes is not None:
        raise ConfigError(
            f"model.heads.{head.label}.classes: expected none, since the targets of {task.name} have numbers; leave them out"
        )
    if numeric:
        numbers = np.array(values, dtype=np.float64)
        if head.regression:
            return np.clip(0.25 * (numbers - numbers.mean()) / max(numbers.std(), 1e-12) + 0.5, 0, 1).astype(np.float32)
        return fit_bins(numbers, getattr(task, "bins", 10), getattr(task, "binning", "mean2std"))(numbers)
    classes = class_names(head, task)
    if classes is None:
        raise DataError(
            f"model.heads.{head.label}: expected a value in every target of {task.name}, as in the first, got one without"
        )
    place_of = {name: place for place, name in enumerate(classes)}
    unknown = sorted({str(name) for name in names} - set(place_of))
    if unknown:
        raise DataError(
            f"model.heads.{head.label}: expected one of the labels {', '.join(classes)}, got {unknown[0]!r}; add it to classes"
        )
    return np.array([place_of[str(name)] for name in names], dtype=np.int64)


def class_names(head: Head, task: ProbeTask) -> tuple[str, ...] | None:
    """Labels of a task of classes; None for one of numbers.

    Raises:
        ConfigError: The set is open and the head does not name it.
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
    """Outputs of a classifying head: the labels, or the bins of a task of numbers."""
    names = class_names(head, task)
    return getattr(task, "bins", 10) if names is None else len(names)
