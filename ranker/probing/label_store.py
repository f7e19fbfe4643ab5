"""From tasks to arrays: labelled examples, made once and kept; parts, classes and bins; the targets that truncation leaves."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Collection
from ranker.errors import DataError
from ranker.files import REBUILD, verify_folder, write_folder
from ranker.probing.binning import Bins, fit_bins
from ranker.probing.controls import type_of
from ranker.probing.examples import PARTS, PairSample, ProbeExample, ProbeTask, read_examples, to_record, write_examples
from ranker.probing.sequences import Sequences

log = logging.getLogger(__name__)

FORMAT = 1


def collection_fingerprint(collection: Collection) -> str:
    """Hash of docs, queries and judgements."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(collection.docs.fingerprint.encode())
    for part in (collection.queries, collection.qrels):
        digest.update(repr(sorted(part.items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def labelled_examples(task: ProbeTask, sample: PairSample, cache_dir: Path) -> list[ProbeExample]:
    """A task's examples, from `cache_dir` where they were made before with the same labeller on the same pairs.

    Raises:
        TaskUnavailable: The labels can't be made here.
        DataError: The task finds no example, or the kept ones are damaged.
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
    folder = (
        cache_dir
        / "probe_labels"
        / f"{task.name}-{hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()}"
    )
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
            f"probe.{task.name}: expected at least one example, got none among {len(sample.pairs)} pairs; take more pairs"
        )
    return examples


@dataclass(frozen=True)
class ProbeData:
    """A task's targets as arrays, the same for every subject.

    Args:
        task: The task.
        examples: The pairs that have a target.
        classes: Names of the classes.
        part: Part of each pair, str [pairs].
        pair_starts: Targets of pair i are those from `pair_starts[i]` to `pair_starts[i + 1]`, int64 [pairs + 1].
        labels: Class of each target, int64 [targets].
        types: What the control task's labels hang on, [targets].
        bins: Edges, where the labels are bins.
        num_cut: Targets left out because truncation cut a span.
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
        """Spans of a target."""
        return len(self.examples[0].targets[0].spans)

    def pairs_in(self, part: str) -> np.ndarray:
        """Numbers of the pairs in a part, int64."""
        return np.flatnonzero(self.part == part)

    def targets_of(self, pairs: np.ndarray) -> np.ndarray:
        """The targets of some pairs, pair by pair, int64 [targets]."""
        return np.concatenate([np.arange(self.pair_starts[pair], self.pair_starts[pair + 1]) for pair in pairs])

    @property
    def target_parts(self) -> np.ndarray:
        """Part of each target, str [targets]."""
        return np.repeat(self.part, np.diff(self.pair_starts))

    @property
    def target_queries(self) -> np.ndarray:
        """Query of each target, str [targets]."""
        return np.repeat(np.array([example.query_id for example in self.examples]), np.diff(self.pair_starts))

    def record(self) -> dict[str, Any]:
        """What to keep beside the results."""
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
    """Keep the targets that every subject sees whole, and make classes of their labels.

    Args:
        task: The task.
        examples: Its examples.
        parts: The part of each.
        spans: Per subject, example and target the tokens of its spans, or None where a span is cut.
        max_classes: More classes than this are a mistake.

    Raises:
        DataError: A part is empty, or there is only one class.
    """
    kept_examples, kept_parts, values, names, types, counts = [], [], [], [], [], [0]
    num_cut = 0
    for place, (example, part) in enumerate(zip(examples, parts, strict=True)):
        kept = [target for i, target in enumerate(example.targets) if all(own[place][i] is not None for own in spans)]
        num_cut += len(example.targets) - len(kept)
        if not kept:
            continue
        kept_examples.append(
            ProbeExample(example.query_id, example.doc_id, example.query, example.doc, tuple(kept), example.part)
        )
        kept_parts.append(part)
        counts.append(len(kept))
        for target in kept:
            values.append(target.value)
            names.append(target.label)
            types.append(type_of(example, target))
    if {len(target.spans) for example in kept_examples for target in example.targets} not in ({1}, {2}):
        raise DataError(
            f"probe.{task.name}: expected targets of one span, or of two, got both or none; make two tasks of them"
        )
    part_of = np.array(kept_parts)
    train = np.repeat(part_of == "train", counts[1:])
    for part in PARTS:
        if not np.any(part_of == part):
            raise DataError(
                f"probe.{task.name}: expected pairs in {part}, got none of {len(kept_examples)}; raise max_pairs"
            )
    bins: Bins | None = None
    if all(value is not None for value in values):
        numbers = np.array(values, dtype=np.float64)
        bins = fit_bins(numbers[train], getattr(task, "bins", 10), getattr(task, "binning", "mean2std"))
        labels, classes = bins(numbers), tuple(str(i) for i in range(bins.num_bins))
    else:
        classes = task.classes or tuple(sorted({str(name) for name in names}))
        place_of = {name: i for i, name in enumerate(classes)}
        unknown = sorted({str(name) for name in names} - set(classes))
        if unknown:
            raise DataError(
                f"probe.{task.name}: expected one of the labels {', '.join(classes)}, got {unknown[0]!r}; mend the labels"
            )
        labels = np.array([place_of[str(name)] for name in names], dtype=np.int64)
    if not 2 <= len(classes) <= max_classes:
        raise DataError(
            f"probe.{task.name}: expected 2 to {max_classes} classes, got {len(classes)}; is there anything to tell apart?"
        )
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([FORMAT, task.name, task.labeller, classes, kept_parts], ensure_ascii=True).encode())
    for example in kept_examples:
        digest.update(json.dumps(to_record(example, ""), ensure_ascii=True).encode())
    digest.update(labels.tobytes())
    return ProbeData(
        task,
        kept_examples,
        classes,
        part_of,
        np.cumsum(counts).astype(np.int64),
        labels,
        types,
        bins,
        num_cut,
        digest.hexdigest(),
    )


def span_tokens(
    examples: Sequence[ProbeExample], sequences: Sequences, place_of: dict[tuple[str, str], int]
) -> list[list[Any]]:
    """Tokens of each example's targets, [slots][2] each, or None where truncation cut one.

    Args:
        examples: A task's examples.
        sequences: What the subject reads.
        place_of: Number of each (query, doc) text pair in them.
    """
    found = []
    for example in examples:
        pair = place_of[example.query, example.doc]
        rows = [[sequences.tokens_of(pair, span) for span in target.spans] for target in example.targets]
        found.append([None if any(span is None for span in row) else row for row in rows])
    return found


def span_array(data: ProbeData, sequences: Sequences, place_of: dict[tuple[str, str], int]) -> np.ndarray:
    """Tokens of the kept targets' spans, int64 [targets, slots, 2]."""
    return np.array(
        [target for row in span_tokens(data.examples, sequences, place_of) for target in row], dtype=np.int64
    )
