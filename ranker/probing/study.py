"""A study: subjects x tasks x layers x seeds, with controls, on the same pairs, permutations and initial weights."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranker.errors import ConfigError, DataError
from ranker.probing.blocks import BlockStore
from ranker.probing.code_length import FRACTIONS, UNITS, portion_ends
from ranker.probing.controls import (
    CONTROLS,
    MAIN,
    check_controls,
)
from ranker.probing.examples import PairSample, ProbeExample, ProbeTask, TaskUnavailable
from ranker.probing.jobs import KeyedStates, make_jobs
from ranker.probing.label_store import ProbeData, build_data, labelled_examples, span_array, span_tokens
from ranker.probing.measuring import prior_result, result_of
from ranker.probing.online_code import Job, OnlineCoder
from ranker.probing.pairs import assign_parts, says_parts
from ranker.probing.results import Result, Results, TaskRecord
from ranker.probing.sequences import Sequences, within_spans
from ranker.probing.spacy_model import forget
from ranker.probing.state_cache import StateCache
from ranker.probing.states import RandomEmbeddings
from ranker.probing.subject import Subject
from ranker.probing.training import TrainingOptions
from ranker.probing.workers import code_jobs

log = logging.getLogger(__name__)

LOG_SECONDS = 20

Owned = tuple[Job, Subject, dict[str, ProbeData]]  # a job, whose it is, and its tasks by name


@dataclass(frozen=True)
class StudyOptions:
    """What a study measures.

    Args:
        seeds: One permutation and one set of initial weights each.
        controls: Names of controls.
        control_seeds: Controls are run with so many of the seeds.
        layers: Layers to probe; None for all.
        portions: Shares of the training pairs at which blocks end.
        validation: `fixed` or `within`.
        units: `bits` or `legacy_mixed`, for compression.
        batching: `auto`, `separate` or `stacked`.
        group_by: What must not be in two parts: `query`, `doc` or `pair`.
        val_fraction: Share for validation.
        test_fraction: Share for the test.
        max_query_tokens: Longest query.
        max_doc_tokens: Longest doc.
        skip_unavailable: Leave out tasks whose labels can't be made here, and say so.
        seed: Seed of control labels and random weights.
        workers: Processes that train probes on a CPU; None for one a core.
    """

    seeds: Sequence[int] = (0, 1, 2)
    controls: Sequence[str] = CONTROLS
    control_seeds: int = 1
    layers: Sequence[int] | None = None
    portions: Sequence[float] = FRACTIONS
    validation: str = "fixed"
    units: str = "bits"
    batching: str = "auto"
    group_by: str = "query"
    val_fraction: float = 1 / 6
    test_fraction: float = 1 / 6
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    skip_unavailable: bool = False
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        check_controls(self.controls)
        if self.units not in UNITS:
            raise ConfigError(f"units: expected one of {', '.join(UNITS)}; got {self.units!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"seeds: expected different numbers of at least 0, got {list(self.seeds)}")

    def coding(self, training: TrainingOptions, dtype: str) -> dict[str, Any]:
        """What a code's length hangs on beside data, subject and seeds; only codes that were made alike can be compared.

        Args:
            training: How the probes are trained.
            dtype: How states are kept.
        """
        names = ("validation", "max_query_tokens", "max_doc_tokens")
        made = {name: getattr(self, name) for name in names} | {
            f"training.{name}": value for name, value in asdict(training).items()
        }
        return {"portions": list(self.portions), "cache.dtype": dtype} | made


@dataclass
class PairSet:
    """Pairs whose states are computed together: (query, doc) texts, the tasks on them, what each subject reads, each task's targets."""

    texts: list[tuple[str, str]]
    tasks: list[tuple[ProbeTask, list[ProbeExample], list[str]]] = field(default_factory=list)
    read: list[Sequences] = field(default_factory=list)
    data: list[ProbeData] = field(default_factory=list)

    @property
    def place_of(self) -> dict[tuple[str, str], int]:
        """Number of each pair."""
        return {pair: place for place, pair in enumerate(self.texts)}


class Study:
    """Runs a study.

    Args:
        subjects: What is probed; two are compared.
        tasks: Probing tasks.
        sample: Pairs and collection.
        options: What is measured.
        training: How a probe is trained.
        cache: Where states are kept.
        cache_dir: Where labels and finished blocks are kept.
        device: Where to compute.
        reuse: Whether to take up blocks that an earlier run finished.
    """

    def __init__(
        self, subjects: Sequence[Subject], tasks: Sequence[ProbeTask], sample: PairSample, options: StudyOptions, training: TrainingOptions,
        cache: StateCache, cache_dir: Path, device: torch.device, reuse: bool = True,
    ) -> None:  # fmt: skip
        if len({subject.name for subject in subjects}) < len(subjects):
            raise ConfigError(
                f"compare: expected another subject than {subjects[0].name!r}, got the same name twice; rename a run folder"
            )
        self.subjects, self.tasks, self.sample, self.options, self.training = (
            list(subjects),
            list(tasks),
            sample,
            options,
            training,
        )
        self.cache, self.cache_dir, self.device = cache, cache_dir, device
        self.warnings: list[str] = []
        self.queries: dict[str, set[str]] = {}
        self._sets: list[PairSet] = []
        store = BlockStore(cache_dir / "probe_blocks.sqlite" if reuse else None)
        self._coder = OnlineCoder(
            training, options.portions, options.validation, options.batching, store, self._progress
        )
        self._done, self._total, self._told = 0, 0, time.monotonic()

    def prepare(self) -> dict[str, TaskRecord]:
        """Make the labels and targets of every task, once; nothing is encoded or trained yet.

        Returns:
            What is kept of each task, in order.
        """
        if not self._sets:
            self._sets = self._pair_sets()
            for pair_set in self._sets:
                pair_set.read = [self._sequences(subject, pair_set) for subject in self.subjects]
                place_of = pair_set.place_of
                pair_set.data = [
                    build_data(
                        task,
                        examples,
                        parts,
                        [span_tokens(examples, sequences, place_of) for sequences in pair_set.read],
                    )
                    for task, examples, parts in pair_set.tasks
                ]
            self._warn()
        data = {own.task.name: own for pair_set in self._sets for own in pair_set.data}
        self.queries = {
            name: {example.query for example in own.examples if example.query} for name, own in data.items()
        }
        coding = {"coding": self.options.coding(self.training, self.cache.dtype)}
        return {
            task.name: TaskRecord(own.record() | coding, own.target_queries[own.target_parts == "train"])
            for task in self.tasks
            if (own := data.get(task.name)) is not None
        }

    def run(self) -> Results:
        """Prepare, encode, code, and measure."""
        records = self.prepare()
        results: list[Result] = []
        waiting: list[Owned] = []
        for pair_set in self._sets:
            data = pair_set.data
            by_name = {own.task.name: own for own in data}
            for subject, sequences in zip(self.subjects, pair_set.read, strict=True):
                waiting += [(job, subject, by_name) for job in self._jobs(subject, sequences, data, pair_set.place_of)]
                if "label_prior" in self.options.controls:
                    results += [
                        prior_result(subject, own, seed, self.options.portions)
                        for own in data
                        for seed in self.options.seeds
                    ]
                if self.device.type == "cuda":  # which holds one subject's states at a time
                    results += self._code(waiting)
                    waiting = []
        if waiting:
            results += self._code(waiting)
        order = {task.name: place for place, task in enumerate(self.tasks)}
        models = {subject.name: place for place, subject in enumerate(self.subjects)}
        results.sort(key=lambda r: (models[r.model], order[r.task], r.control != MAIN, r.control, r.layer or 0, r.seed))
        return Results(results, records, self.options.units)

    # data
    # -------------------------------------------------------------------------------------------------------------------------

    def _pair_sets(self) -> list[PairSet]:
        """Tasks on the shared pairs in one set, each other task in a set of its own."""
        shared = PairSet([(query, doc) for _, _, query, doc in self.sample.texts()])
        known = set(shared.texts)
        sets = [shared]
        for task in self.tasks:
            try:
                examples = labelled_examples(task, self.sample, self.cache_dir)
            except TaskUnavailable as error:
                if not self.options.skip_unavailable:
                    raise
                self.warnings.append(f"{task.name} was left out: {error}")
                log.warning("%s is left out: %s", task.name, error)
                continue
            parts = assign_parts(
                examples, self.sample, self.options.group_by, self.options.val_fraction, self.options.test_fraction
            )
            texts = dict.fromkeys((example.query, example.doc) for example in examples)
            if texts.keys() <= known:
                shared.tasks.append((task, examples, parts))
            else:
                sets.append(PairSet(list(texts), [(task, examples, parts)]))
        forget()
        if not any(pair_set.tasks for pair_set in sets):
            raise DataError(
                "probe: expected at least one task whose labels can be made here, got none; see the warnings above"
            )
        return [pair_set for pair_set in sets if pair_set.tasks]

    def _sequences(self, subject: Subject, pair_set: PairSet) -> Sequences:
        return Sequences.of(
            pair_set.texts,
            subject.encoder.tokenizer,
            subject.reads,
            subject.encoder.max_tokens,
            self.options.max_query_tokens,
            self.options.max_doc_tokens,
            subject.layouts,
        )

    def _warn(self) -> None:
        """Say what truncation cost, which classes are empty, and what test and training pairs share."""
        data = [own for pair_set in self._sets for own in pair_set.data]
        records = {own.task.name: own.record() for own in data}
        for name, record in records.items():
            if record["cut_targets"]:
                whole = sum(map(sum, record["class_counts"].values())) + record["cut_targets"]
                self.warnings.append(
                    f"{name}: {record['cut_targets']} of {whole} targets lie beyond the truncation and are left out"
                )
            empty = record["class_counts"]["train"].count(0)
            if empty:
                self.warnings.append(
                    f"{name}: k = {len(record['classes'])}, of which {empty} empty in training; log2 k counts them all"
                )
        own_parts = {own.task.name for own in data if says_parts(own.examples)}
        for what, least in (("doc", 0.1), ("query", 0.0)):
            shares = {name: record[f"test_pairs_with_a_training_{what}"] for name, record in records.items()}
            for said, remedy in (
                (False, f"group_by={what} avoids it"),
                (True, "parts of the task's own, which group_by leaves as they are"),
            ):
                some = [
                    f"{name} {share:.0%}"
                    for name, share in shares.items()
                    if share > least and (name in own_parts) == said
                ]
                if some:
                    self.warnings.append(
                        f"test pairs whose {what} also occurs in a training pair: {', '.join(some)} ({remedy})"
                    )

    # probing
    # ----------------------------------------------------------------------------------------------------------------------

    def layers_of(self, subject: Subject) -> list[int]:
        """The layers of a subject to probe.

        Raises:
            ConfigError: It lacks one of those asked for.
        """
        layers = list(self.options.layers) if self.options.layers is not None else list(range(subject.num_states))
        wrong = [layer for layer in layers if not 0 <= layer < subject.num_states]
        if wrong:
            raise ConfigError(f"layers: expected 0 to {subject.num_states - 1} for {subject.name}, got {wrong[0]}")
        return layers

    def _jobs(
        self, subject: Subject, sequences: Sequences, data: Sequence[ProbeData], place_of: dict[tuple[str, str], int]
    ) -> list[Job]:
        """Encode, and say what is to be coded."""
        layers = self.layers_of(subject)
        controls, seeds = self.options.controls, list(self.options.seeds)
        spans = [span_array(own, sequences, place_of) for own in data]
        kept = None
        if self.cache.tokens == "spans":
            kept = within_spans(spans, sequences.num_tokens)
            places = np.concatenate([[0], np.cumsum(kept)])
            spans = [places[own] for own in spans]  # no span has a gap
        states = {MAIN: self._states(subject, sequences, layers, kept)}
        if "random_encoder" in controls:
            states["random_encoder"] = self._states(subject.randomised(self.options.seed), sequences, layers, kept)
        if "random_embeddings" in controls:
            states["random_embeddings"] = self._random_embeddings(subject, sequences, kept)
        return make_jobs(
            data, spans, states, layers, controls, seeds, self.options.control_seeds, self.options.seed, self.device
        )

    def _code(self, owned: Sequence[Owned]) -> list[Result]:
        """Code jobs side by side, and measure."""
        jobs = [job for job, _, _ in owned]
        probes = sum(
            len(job.layers)
            * len(job.columns)
            * len(job.seeds)
            * len(portion_ends(len(job.train), self.options.portions))
            for job in jobs
        )
        self._total = self._done + probes
        log.info("%d probes to train", probes)
        return [
            result_of(subject, by_name[outcome.column.task], outcome, self.options.portions, self.sample.collection)
            for (_, subject, by_name), outcomes in zip(
                owned, code_jobs(self._coder, jobs, self.options.workers), strict=True
            )
            for outcome in outcomes
        ]

    def _states(
        self, subject: Subject, sequences: Sequences, layers: list[int], kept: np.ndarray | None
    ) -> KeyedStates:
        states = self.cache.states(subject, sequences, layers, self.device, kept)
        if self.device.type == "cuda" and states.nbytes * 1.5 < torch.cuda.mem_get_info(self.device)[0]:
            states = states.to(self.device)
        key = hashlib.blake2b(
            repr(self.cache.identity(subject, sequences, layers, kept)).encode(), digest_size=10
        ).hexdigest()
        return states, key

    def _random_embeddings(self, subject: Subject, sequences: Sequences, kept: np.ndarray | None) -> KeyedStates:
        tokens = np.concatenate(
            [sequences.batch(*chunk).tokens.numpy() for chunk in sequences.chunks(self.cache.max_tokens)]
        )
        vocabulary = max(int(tokens.max()) + 1, subject.encoder.config.vocab_size)
        own = tokens if kept is None else tokens[kept]
        made = RandomEmbeddings.of(own, vocabulary, subject.encoder.dim, self.options.seed, self.device)
        key = hashlib.blake2b(own.tobytes(), digest_size=10).hexdigest()
        return made, f"random-embeddings {vocabulary} {subject.encoder.dim} {self.options.seed} {key}"

    def _progress(self, members: int) -> None:
        self._done += members
        if time.monotonic() - self._told >= LOG_SECONDS:
            self._told = time.monotonic()
            log.info("%d of about %d probes trained", self._done, max(self._total, self._done))
