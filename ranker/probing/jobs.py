"""Make the jobs of a subject (the encoder or ranker that is probed).

A job trains the probes of some tasks and controls on the same spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ranker.probing.batches import Inputs
from ranker.probing.coding_jobs import Job, LabelSet
from ranker.probing.controls import MAIN, control_labels, shuffled_labels, standardised, surface_features
from ranker.probing.label_store import ProbeData
from ranker.probing.options import StudyOptions
from ranker.probing.state_readers import States, TensorStates

KeyedStates = tuple[States, str]  # token states, and a hash of everything that decides the states


@dataclass(frozen=True)
class TaskGroup:
    """Tasks with the same pairs, the same split of the pairs, the same spans and the same number of classes.

    The split divides the pairs into train, val and test. A target is one labelled example. Its slots are its one or
    two spans.

    Args:
        tasks: Data of each task.
        spans: Start and end (exclusive) token of each span, int64 [targets, slots, 2].
    """

    tasks: list[ProbeData]
    spans: np.ndarray

    def job(
        self,
        inputs: Inputs,
        states_key: str,
        layers: dict[int, int],
        label_sets: Sequence[LabelSet],
        seeds: Sequence[int],
    ) -> Job:
        """Return a job on the pairs of this group; for the arguments see `Job`."""
        data = self.tasks[0]
        return Job(
            inputs=inputs,
            states_key=states_key,
            layers=layers,
            label_sets=label_sets,
            classes=len(data.classes),
            train=data.pairs_in("train"),
            val=data.pairs_in("val"),
            test=data.pairs_in("test"),
            seeds=seeds,
        )


def make_jobs(
    data: Sequence[ProbeData],
    spans: Sequence[np.ndarray],
    states: Mapping[str, KeyedStates],
    layers: Sequence[int],
    options: StudyOptions,
    device: torch.device,
) -> list[Job]:
    """Make the jobs of one subject on one set of pairs.

    Args:
        data: Data of each task.
        spans: Spans of each task, see `TaskGroup`.
        states: Token states by control; `none` has the subject's own states, which most controls also read.
        layers: Layers to probe, in the order of the states' layer axis.
        options: Controls and seeds.
        device: Device to compute on.
    """
    layer_index = {layer: i for i, layer in enumerate(layers)}
    # shuffled labels only serve to find leaks, for which two layers are enough
    two_layers = {layer: layer_index[layer] for layer in sorted({layers[len(layers) // 2], layers[-1]})}
    control_seeds, other_seeds = options.seeds[: options.control_seeds], options.seeds[options.control_seeds :]
    jobs: list[Job] = []
    for group in _group(data, spans):

        def add(
            source: str, layers: dict[int, int], controls: Sequence[str], seeds: Sequence[int], group: TaskGroup = group
        ) -> None:
            inputs = Inputs(states[source][0], group.spans, group.tasks[0].pair_starts, device)
            label_sets = [labels_of(task, control, options.seed) for control in controls for task in group.tasks]
            jobs.append(group.job(inputs, states[source][1], layers, label_sets, list(seeds)))

        # a task and its control task are in one job, so that the states of a batch are gathered once for both
        with_control = [MAIN, *(["control_task"] if "control_task" in options.controls else [])]
        add(MAIN, layer_index, with_control, control_seeds)
        add(MAIN, layer_index, [MAIN], other_seeds)
        if "shuffled" in options.controls:
            add(MAIN, two_layers, ["shuffled"], control_seeds)
        for name, control_layers in (("random_encoder", layer_index), ("random_embeddings", {0: 0})):
            if name in options.controls:
                add(name, control_layers, [name], control_seeds)
        if "surface" in options.controls and group.tasks[0].task.whole_text and group.tasks[0].slots == 2:
            jobs.append(_surface_job(group, list(control_seeds), device))
    return [job for job in jobs if job.seeds]


def labels_of(data: ProbeData, control: str, seed: int) -> LabelSet:
    """Return the labels of a task for a control.

    Args:
        data: The task's data.
        control: Name of the control, or `none`.
        seed: Seed of control labels.
    """
    labels = data.labels
    if control == "control_task":
        labels = control_labels(data.types, labels, data.target_parts == "train", len(data.classes), seed)
    elif control == "shuffled":
        labels = shuffled_labels(labels, data.target_parts, seed)
    return LabelSet(data.task.name, control, labels)


def _group(data: Sequence[ProbeData], spans: Sequence[np.ndarray]) -> list[TaskGroup]:
    groups: dict[str, TaskGroup] = {}
    for task, task_spans in zip(data, spans, strict=True):
        shape = (len(task.classes), task.part.tolist(), task_spans.shape)
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
        for array in (task.pair_starts, task_spans):
            digest.update(np.ascontiguousarray(array).tobytes())
        groups.setdefault(digest.hexdigest(), TaskGroup([], task_spans)).tasks.append(task)
    return list(groups.values())


def _surface_job(group: TaskGroup, seeds: list[int], device: torch.device) -> Job:
    """Return a job that reads features of texts in place of token states, with one token and one span per pair."""
    data = group.tasks[0]
    features = np.array([surface_features(example.query, example.doc) for example in data.examples])
    vectors = standardised(features, data.part == "train")
    starts = np.arange(len(vectors))
    spans = np.stack([starts, starts + 1], axis=1)[:, None]
    inputs = Inputs(TensorStates(torch.from_numpy(vectors)[None].to(device)), spans, data.pair_starts, device)
    key = f"surface@1 {hashlib.blake2b(vectors.tobytes(), digest_size=10).hexdigest()}"
    label_sets = [LabelSet(task.task.name, "surface", task.labels) for task in group.tasks]
    return group.job(inputs, key, {0: 0}, label_sets, seeds)
