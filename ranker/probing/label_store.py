"""Labels of tasks: the examples, which are stored on disk, and their targets as arrays (`ProbeData`)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Collection
from ranker.errors import DataError
from ranker.files.checksums import REBUILD, verify_folder
from ranker.files.folders import write_folder
from ranker.probing.batches import targets_of_pairs
from ranker.probing.binning import Bins, fit_bins
from ranker.probing.controls import type_of
from ranker.probing.examples import PARTS, PairSample, ProbeExample, ProbeTask, read_examples, to_record, write_examples
from ranker.probing.sequences import Sequences

log = logging.getLogger(__name__)

FORMAT = 1


def collection_fingerprint(collection: Collection) -> str:
    """Return a hash of docs, queries and judgements."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(collection.docs.fingerprint.encode())
    for part in (collection.queries, collection.qrels):
        digest.update(repr(sorted(part.items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def labelled_examples(task: ProbeTask, sample: PairSample, cache_dir: Path) -> list[ProbeExample]:
    """Return a task's examples, from the cache in `cache_dir` if this labeller has labelled the same pairs before.

    Args:
        task: The task.
        sample: Pairs and collection.
        cache_dir: Folder of all caches.

    Raises:
        TaskUnavailable: A package or file that the labels need is missing.
        DataError: The task has no example, or the cached examples are damaged.
    """
    candidates = sample.collection.candidates
    key = [
        FORMAT,
        task.name,
        task.labeller,
        collection_fingerprint(sample.collection),
        list(sample.pairs),
        sample.parts,
        sample.max_pairs,
        sample.docs_per_query,
        sample.depth,
        sample.seed,
        [] if candidates is None else [candidates[query_id][: sample.depth] for query_id in sample.parts],
        *([sample.collection.relevance] if task.ranks else []),
    ]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()
    folder = cache_dir / "probe_labels" / f"{task.name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            log.info("%s: making labels (%s)", task.name, task.labeller)
            with write_folder(folder) as partial:
                write_examples(partial / "examples.jsonl", task.examples(sample), task.labeller)
        verify_folder(folder, fix=REBUILD)
    examples = list(read_examples(folder / "examples.jsonl"))
    if not examples:
        raise DataError(
            f"probe.{task.name}: expected at least one example, got none among {len(sample.pairs)} pairs; "
            "take more pairs"
        )
    return examples


@dataclass(frozen=True)
class ProbeData:
    """A task's targets as arrays, which are the same for every subject.

    Args:
        task: The task.
        examples: The pairs that have a target.
        classes: Names of the classes.
        part: Part of each pair: `train`, `val` or `test`, str [pairs].
        pair_starts: Pair i has the targets from `pair_starts[i]` to `pair_starts[i + 1]`, int64 [pairs + 1].
        labels: Class of each target, int64 [targets].
        types: Word type of each target [targets], which decides the label of the control task.
        bins: The bins, if labels are bins; else None.
        num_cut: Number of targets left out because truncation cut a span.
        fingerprint: Hash of labeller, texts, spans, labels and parts.
    """

    task: ProbeTask
    examples: list[ProbeExample]
    classes: tuple[str, ...]
    part: np.ndarray
    pair_starts: np.ndarray
    labels: np.ndarray
    types: list[str]
    bins: Bins | None
    num_cut: int
    fingerprint: str

    @property
    def slots(self) -> int:
        """Number of spans of a target, 1 or 2."""
        return len(self.examples[0].targets[0].spans)

    def pairs_in(self, part: str) -> np.ndarray:
        """Return the indices of the pairs in a part, int64."""
        return np.flatnonzero(self.part == part)

    def targets_of(self, pairs: np.ndarray) -> np.ndarray:
        """Return the targets of some pairs, pair by pair, int64 [targets]."""
        return targets_of_pairs(self.pair_starts, pairs)

    @property
    def target_parts(self) -> np.ndarray:
        """Return the part of each target, str [targets]."""
        return np.repeat(self.part, np.diff(self.pair_starts))

    @property
    def target_queries(self) -> np.ndarray:
        """Return the query of each target, str [targets]."""
        return np.repeat(np.array([example.query_id for example in self.examples]), np.diff(self.pair_starts))

    def record(self) -> dict[str, Any]:
        """Return the description of the data as JSON values, which are stored with the results."""
        by_part = {
            part: np.bincount(self.labels[self.target_parts == part], minlength=len(self.classes)).tolist()
            for part in PARTS
        }
        train, test = ([self.examples[pair] for pair in self.pairs_in(part)] for part in ("train", "test"))
        docs, queries = {example.doc_id for example in train}, {example.query_id for example in train}
        return {
            "task": self.task.name,
            "labeller": self.task.labeller,
            "data_hash": self.fingerprint,
            "classes": list(self.classes),
            "bins": None if self.bins is None else self.bins.record(),
            "pairs": {part: int(np.sum(self.part == part)) for part in PARTS},
            "class_counts": by_part,
            "cut_targets": self.num_cut,
            "test_pairs_with_a_training_doc": float(np.mean([example.doc_id in docs for example in test])),
            "test_pairs_with_a_training_query": float(np.mean([example.query_id in queries for example in test])),
        }


def build_data(
    task: ProbeTask,
    examples: Sequence[ProbeExample],
    parts: Sequence[str],
    spans: Sequence[Sequence[Sequence[Any]]],
    max_classes: int = 1000,
) -> ProbeData:
    """Keep the targets that are not truncated for any subject, and turn their labels or values into class indices.

    Args:
        task: The task.
        examples: The task's examples.
        parts: Part of each example.
        spans: Tokens of the spans of each target, [subjects][examples][targets]; None if truncation has cut a span.
        max_classes: Maximum number of classes.

    Raises:
        DataError: A part is empty, targets differ in their number of spans, a label is unknown, or there is only one
            class or more than `max_classes`.
    """
    uncut: list[ProbeExample] = []
    uncut_parts: list[str] = []
    for i, (example, part) in enumerate(zip(examples, parts, strict=True)):
        targets = [
            target
            for j, target in enumerate(example.targets)
            if all(subject_spans[i][j] is not None for subject_spans in spans)
        ]
        if targets:
            uncut.append(replace(example, targets=tuple(targets)))
            uncut_parts.append(part)
    counts = [len(example.targets) for example in uncut]
    _check_targets(task, uncut, uncut_parts)
    part_of = np.array(uncut_parts)
    labels, classes, bins = _classes(task, uncut, np.repeat(part_of == "train", counts))
    if not 2 <= len(classes) <= max_classes:
        raise DataError(
            f"probe.{task.name}: expected 2 to {max_classes} classes, got {len(classes)}; change the labels of the task"
        )
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([FORMAT, task.name, task.labeller, classes, uncut_parts], ensure_ascii=True).encode())
    for example in uncut:
        digest.update(json.dumps(to_record(example, ""), ensure_ascii=True).encode())
    digest.update(labels.tobytes())
    return ProbeData(
        task=task,
        examples=uncut,
        classes=classes,
        part=part_of,
        pair_starts=np.cumsum([0, *counts]).astype(np.int64),
        labels=labels,
        types=[type_of(example, target) for example in uncut for target in example.targets],
        bins=bins,
        num_cut=sum(len(example.targets) for example in examples) - sum(counts),
        fingerprint=digest.hexdigest(),
    )


def _check_targets(task: ProbeTask, examples: Sequence[ProbeExample], parts: Sequence[str]) -> None:
    num_spans = {len(target.spans) for example in examples for target in example.targets}
    if num_spans not in ({1}, {2}):
        raise DataError(
            f"probe.{task.name}: expected one span in every target or two in every target, got {sorted(num_spans)}; "
            "split them into two tasks"
        )
    for part in PARTS:
        if part not in parts:
            raise DataError(
                f"probe.{task.name}: expected pairs in {part}, got none of {len(examples)}; raise max_pairs"
            )


def _classes(
    task: ProbeTask, examples: Sequence[ProbeExample], train: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...], Bins | None]:
    """Return the class of each target, int64 [targets], the names of the classes, and the bins of training targets."""
    targets = [target for example in examples for target in example.targets]
    values = [target.value for target in targets]
    if all(value is not None for value in values):
        numbers = np.array(values, dtype=np.float64)
        bins = fit_bins(numbers[train], getattr(task, "bins", 10), getattr(task, "binning", "mean2std"))
        return bins(numbers), tuple(str(i) for i in range(bins.num_bins)), bins
    labels = [str(target.label) for target in targets]
    classes = task.classes or tuple(sorted(set(labels)))
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise DataError(
            f"probe.{task.name}: expected one of the labels {', '.join(classes)}, got {unknown[0]!r}; fix the labels"
        )
    class_index = {name: i for i, name in enumerate(classes)}
    return np.array([class_index[label] for label in labels], dtype=np.int64), classes, None


def span_tokens(
    examples: Sequence[ProbeExample], sequences: Sequences, pair_index: dict[tuple[str, str], int]
) -> list[list[Any]]:
    """Return the tokens of the spans of each example's targets, [slots][2] per target; None if truncation cut a span.

    Args:
        examples: A task's examples.
        sequences: Token sequences that the subject reads.
        pair_index: Index in `sequences` of each (query, doc) pair of texts.
    """
    tokens = []
    for example in examples:
        pair = pair_index[example.query, example.doc]
        rows = [[sequences.tokens_of(pair, span) for span in target.spans] for target in example.targets]
        tokens.append([None if any(span is None for span in row) else row for row in rows])
    return tokens


def span_array(data: ProbeData, sequences: Sequences, pair_index: dict[tuple[str, str], int]) -> np.ndarray:
    """Return the tokens of the spans of all targets, int64 [targets, slots, 2]; for the arguments see `span_tokens`."""
    rows = span_tokens(data.examples, sequences, pair_index)
    return np.array([target for row in rows for target in row], dtype=np.int64)
