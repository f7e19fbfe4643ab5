"""Run a probing study: train probes for every encoder ("subject"), task, layer and seed, and for the controls.

All probes use the same text pairs, permutations and initial probe weights.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ranker.errors import ConfigError
from ranker.probing.blocks import BlockStore
from ranker.probing.code_length import portion_ends
from ranker.probing.coding_jobs import Job
from ranker.probing.controls import MAIN
from ranker.probing.examples import PairSample, ProbeTask
from ranker.probing.jobs import KeyedStates, make_jobs
from ranker.probing.label_store import ProbeData, span_array
from ranker.probing.measuring import prior_result, result_of
from ranker.probing.online_code import OnlineCoder
from ranker.probing.options import StudyOptions
from ranker.probing.pair_sets import PairSet, pair_sets, warnings_of
from ranker.probing.results import Result, Results, TaskRecord
from ranker.probing.sequences import Sequences, span_mask
from ranker.probing.state_cache import StateCache
from ranker.probing.state_readers import RandomEmbeddings
from ranker.probing.subject import Subject
from ranker.probing.training_options import TrainingOptions
from ranker.probing.workers import code_jobs

log = logging.getLogger(__name__)

LOG_SECONDS = 20

SubjectJob = tuple[Job, Subject, dict[str, ProbeData]]  # a job, its subject, and its tasks by name


class Study:
    """A study that can be run.

    Args:
        subjects: One or more frozen encoders to probe. If there are two, the report compares them.
        tasks: Probing tasks.
        sample: Pairs and collection.
        options: Options of the study.
        training: How a probe is trained.
        cache: Cache of states.
        cache_dir: Folder of cached labels and finished blocks.
        device: Device to compute on.

    Attributes:
        warnings: Warnings that the report prints before the numbers; complete after `prepare`.
        queries: Texts of each task's queries, which `prepare` sets.

    Raises:
        ConfigError: Two subjects have the same name, or an option of `OnlineCoder` is wrong.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        tasks: Sequence[ProbeTask],
        sample: PairSample,
        options: StudyOptions,
        training: TrainingOptions,
        cache: StateCache,
        cache_dir: Path,
        device: torch.device,
    ) -> None:
        if len({subject.name for subject in subjects}) < len(subjects):
            raise ConfigError(
                f"compare: expected another subject than {subjects[0].name!r}, got the same name twice; "
                "rename a run folder"
            )
        self.subjects, self.tasks, self.sample = list(subjects), list(tasks), sample
        self.options, self.training = options, training
        self.cache, self.cache_dir, self.device = cache, cache_dir, device
        self.warnings: list[str] = []
        self.queries: dict[str, set[str]] = {}
        self._sets: list[PairSet] = []
        store = BlockStore(cache_dir / "probe_blocks.sqlite" if options.reuse else None)
        self._coder = OnlineCoder(
            training, options.portions, options.validation, options.batching, store, self._progress
        )
        self._done, self._total, self._logged = 0, 0, time.monotonic()

    def prepare(self) -> dict[str, TaskRecord]:
        """Make the labels and targets of every task once, before anything is encoded or trained.

        Returns:
            The record of each task that can be probed, in order.

        Raises:
            TaskUnavailable: The labels of a task cannot be computed, and `skip_unavailable` is false.
            DataError: No task can be probed, or the targets of a task cannot be coded.
        """
        if not self._sets:
            self._sets, missing = pair_sets(self.tasks, self.sample, self.options, self.cache_dir)
            for pair_set in self._sets:
                pair_set.build(self.subjects, self.options)
            self.warnings += [*missing, *warnings_of([data for pair_set in self._sets for data in pair_set.data])]
        data = {task_data.task.name: task_data for pair_set in self._sets for task_data in pair_set.data}
        self.queries = {
            name: {example.query for example in task_data.examples if example.query} for name, task_data in data.items()
        }
        coding = {"coding": self.options.coding(self.training, self.cache.dtype)}
        return {
            task.name: TaskRecord(
                task_data.record() | coding, task_data.target_queries[task_data.target_parts == "train"]
            )
            for task in self.tasks
            if (task_data := data.get(task.name)) is not None
        }

    def run(self) -> Results:
        """Prepare the tasks, encode the texts, compute the online codes, and measure.

        Raises:
            RankerError: See `prepare`, `layers_of` and `StateCache.states`.
        """
        records = self.prepare()
        results: list[Result] = []
        waiting: list[SubjectJob] = []
        for pair_set in self._sets:
            data = pair_set.data
            by_name = {task_data.task.name: task_data for task_data in data}
            for subject, sequences in zip(self.subjects, pair_set.sequences, strict=True):
                jobs = self._jobs(subject, sequences, data, pair_set.pair_index)
                waiting += [(job, subject, by_name) for job in jobs]
                if "label_prior" in self.options.controls:
                    results += [
                        prior_result(subject, task_data, seed, self.options.portions)
                        for task_data in data
                        for seed in self.options.seeds
                    ]
                if self.device.type == "cuda":  # a GPU has the states of one subject at a time
                    results += self._code(waiting)
                    waiting = []
        if waiting:
            results += self._code(waiting)
        tasks = {task.name: i for i, task in enumerate(self.tasks)}
        models = {subject.name: i for i, subject in enumerate(self.subjects)}
        results.sort(key=lambda r: (models[r.model], tasks[r.task], r.control != MAIN, r.control, r.layer or 0, r.seed))
        return Results(results, records, self.options.units)

    def layers_of(self, subject: Subject) -> list[int]:
        """Return the layers of a subject to probe.

        Raises:
            ConfigError: The option `layers` names a layer that the subject does not have.
        """
        layers = list(self.options.layers) if self.options.layers is not None else list(range(subject.num_states))
        wrong = [layer for layer in layers if not 0 <= layer < subject.num_states]
        if wrong:
            raise ConfigError(f"layers: expected 0 to {subject.num_states - 1} for {subject.name}, got {wrong[0]}")
        return layers

    def _jobs(
        self, subject: Subject, sequences: Sequences, data: Sequence[ProbeData], pair_index: dict[tuple[str, str], int]
    ) -> list[Job]:
        """Encode the sequences of a subject, and make its jobs."""
        layers, controls = self.layers_of(subject), self.options.controls
        spans = [span_array(task_data, sequences, pair_index) for task_data in data]
        token_mask = None
        if self.cache.tokens == "spans":
            token_mask = span_mask(spans, sequences.num_tokens)
            stored_index = np.concatenate([[0], np.cumsum(token_mask)])
            spans = [stored_index[bounds] for bounds in spans]  # still contiguous: all tokens of a span are stored
        states = {MAIN: self._states(subject, sequences, layers, token_mask)}
        if "random_encoder" in controls:
            randomised = subject.randomised(self.options.seed)
            states["random_encoder"] = self._states(randomised, sequences, layers, token_mask)
        if "random_embeddings" in controls:
            states["random_embeddings"] = self._random_embeddings(subject, sequences, token_mask)
        return make_jobs(data, spans, states, layers, self.options, self.device)

    def _code(self, subject_jobs: Sequence[SubjectJob]) -> list[Result]:
        """Compute the online codes of jobs, in parallel on a CPU, and return the results."""
        jobs = [job for job, _, _ in subject_jobs]
        portions, collection = self.options.portions, self.sample.collection
        probes = sum(
            len(job.layers) * len(job.label_sets) * len(job.seeds) * len(portion_ends(len(job.train), portions))
            for job in jobs
        )
        self._total = self._done + probes
        log.info("%d probes to train", probes)
        coded = code_jobs(self._coder, jobs, self.options.workers)
        return [
            result_of(subject, by_name[outcome.label_set.task], outcome, portions, collection)
            for (_, subject, by_name), outcomes in zip(subject_jobs, coded, strict=True)
            for outcome in outcomes
        ]

    def _states(
        self, subject: Subject, sequences: Sequences, layers: list[int], token_mask: np.ndarray | None
    ) -> KeyedStates:
        states = self.cache.states(subject, sequences, layers, self.device, token_mask)
        if self.device.type == "cuda" and states.nbytes * 1.5 < torch.cuda.mem_get_info(self.device)[0]:
            states = states.to(self.device)
        identity = repr(self.cache.identity(subject, sequences, layers, token_mask))
        return states, hashlib.blake2b(identity.encode(), digest_size=10).hexdigest()

    def _random_embeddings(self, subject: Subject, sequences: Sequences, token_mask: np.ndarray | None) -> KeyedStates:
        tokens = np.concatenate(
            [sequences.batch(*chunk).tokens.numpy() for chunk in sequences.chunks(self.cache.max_tokens)]
        )
        vocabulary = max(int(tokens.max()) + 1, subject.encoder.config.vocab_size)
        tokens = tokens if token_mask is None else tokens[token_mask]
        states = RandomEmbeddings.of(tokens, vocabulary, subject.encoder.dim, self.options.seed, self.device)
        key = hashlib.blake2b(tokens.tobytes(), digest_size=10).hexdigest()
        return states, f"random-embeddings {vocabulary} {subject.encoder.dim} {self.options.seed} {key}"

    def _progress(self, members: int) -> None:
        self._done += members
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            log.info("%d of about %d probes trained", self._done, max(self._total, self._done))
