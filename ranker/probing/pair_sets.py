"""The text pairs of a study, and its tasks' targets on them; tasks on the shared pairs are encoded together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranker.errors import DataError
from ranker.probing.examples import PairSample, ProbeExample, ProbeTask, TaskUnavailable
from ranker.probing.label_store import ProbeData, build_data, labelled_examples, span_tokens
from ranker.probing.options import StudyOptions
from ranker.probing.pairs import assign_parts, source_assigns_parts
from ranker.probing.sequences import Sequences
from ranker.probing.spacy_model import forget
from ranker.probing.subject import Subject

log = logging.getLogger(__name__)


@dataclass
class PairSet:
    """A set of pairs whose states are computed together.

    Attributes:
        texts: (query, doc) texts of each pair.
        tasks: The tasks on these pairs. Each comes with its examples and with the split (train, val or test) of each
            example.
        sequences: Token sequences of each encoder ("subject").
        data: Targets of each task.
    """

    texts: list[tuple[str, str]]
    tasks: list[tuple[ProbeTask, list[ProbeExample], list[str]]] = field(default_factory=list)
    sequences: list[Sequences] = field(default_factory=list)
    data: list[ProbeData] = field(default_factory=list)

    @property
    def pair_index(self) -> dict[tuple[str, str], int]:
        """Return the index of each pair of texts."""
        return {pair: i for i, pair in enumerate(self.texts)}

    def build(self, subjects: Sequence[Subject], options: StudyOptions) -> None:
        """Set `sequences` and `data`, for the subjects and options of a study."""
        self.sequences = [
            Sequences.of(
                self.texts,
                subject.encoder.tokenizer,
                subject.reads,
                subject.encoder.max_tokens,
                options.max_query_tokens,
                options.max_doc_tokens,
                subject.layouts,
            )
            for subject in subjects
        ]
        pair_index = self.pair_index
        for task, examples, parts in self.tasks:
            spans = [span_tokens(examples, sequences, pair_index) for sequences in self.sequences]
            self.data.append(build_data(task, examples, parts, spans))


def pair_sets(
    tasks: Sequence[ProbeTask], sample: PairSample, options: StudyOptions, cache_dir: Path
) -> tuple[list[PairSet], list[str]]:
    """Return one set for all tasks on the shared pairs, and one set for each other task.

    Args:
        tasks: Probing tasks.
        sample: Pairs and collection.
        options: Options of the study.
        cache_dir: Folder of cached labels.

    Returns:
        The sets that have a task, and a warning for each task that is left out.

    Raises:
        TaskUnavailable: The labels of a task cannot be computed, and `skip_unavailable` is false.
        DataError: The labels of no task can be computed.
    """
    shared = PairSet([(query, doc) for _, _, query, doc in sample.texts()])
    known = set(shared.texts)
    sets = [shared]
    warnings: list[str] = []
    for task in tasks:
        try:
            examples = labelled_examples(task, sample, cache_dir)
        except TaskUnavailable as error:
            if not options.skip_unavailable:
                raise
            warnings.append(f"{task.name} was left out: {error}")
            log.warning("%s is left out: %s", task.name, error)
            continue
        parts = assign_parts(examples, sample, options.group_by, options.val_fraction, options.test_fraction)
        texts = dict.fromkeys((example.query, example.doc) for example in examples)
        if texts.keys() <= known:
            shared.tasks.append((task, examples, parts))
        else:
            sets.append(PairSet(list(texts), [(task, examples, parts)]))
    forget()
    if not any(pair_set.tasks for pair_set in sets):
        raise DataError(
            "probe: expected at least one task whose labels can be computed, got none; see the warnings above"
        )
    return [pair_set for pair_set in sets if pair_set.tasks], warnings


def warnings_of(data: Sequence[ProbeData]) -> list[str]:
    """Return warnings: targets cut off, classes without training targets, texts in both train and test."""
    warnings: list[str] = []
    records = {task_data.task.name: task_data.record() for task_data in data}
    for name, record in records.items():
        if record["cut_targets"]:
            total = sum(map(sum, record["class_counts"].values())) + record["cut_targets"]
            warnings.append(
                f"{name}: {record['cut_targets']} of {total} targets are left out, since truncation cuts them off"
            )
        empty = record["class_counts"]["train"].count(0)
        if empty:
            warnings.append(
                f"{name}: {empty} of the {len(record['classes'])} classes have no training target; the cost of the "
                f"first block, log2 {len(record['classes'])} bits per target, still counts them"
            )
    fixed = {task_data.task.name for task_data in data if source_assigns_parts(task_data.examples)}
    for side, threshold in (("doc", 0.1), ("query", 0.0)):
        shares = {name: record[f"test_pairs_with_a_training_{side}"] for name, record in records.items()}
        for is_fixed, remedy in (
            (False, f"group_by={side} avoids it"),
            (True, "the task's source assigns the parts, group_by does not change them"),
        ):
            shared = [
                f"{name} {share:.0%}"
                for name, share in shares.items()
                if share > threshold and (name in fixed) == is_fixed
            ]
            if shared:
                warnings.append(
                    f"test pairs whose {side} also occurs in a training pair: {', '.join(shared)} ({remedy})"
                )
    return warnings
