"""The jobs of a subject: its tasks and their controls, those together that read the same states at the same time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ranker.probing.batches import Inputs
from ranker.probing.controls import MAIN, control_labels, shuffled_labels, standardised, surface_features
from ranker.probing.label_store import ProbeData
from ranker.probing.online_code import Column, Job
from ranker.probing.states import States, TensorStates

KeyedStates = tuple[States, str]  # vectors, and a hash of how they were made


def make_jobs(
    data: Sequence[ProbeData], spans: Sequence[np.ndarray], states: Mapping[str, KeyedStates], layers: Sequence[int], controls: Sequence[str],
    seeds: Sequence[int], control_seeds: int, label_seed: int, device: torch.device,
) -> list[Job]:  # fmt: skip
    """Make the jobs of one subject and set of pairs.

    Args:
        data: Its tasks.
        spans: Tokens of each task's spans, int64 [targets, slots, 2].
        states: `none` -> the subject's states; and those of the controls that have states of their own.
        layers: Layers to probe, in the order of the states' layer axis.
        controls: Names of controls.
        seeds: Seeds.
        control_seeds: Controls are run with so many of them.
        label_seed: Seed of control labels.
        device: Where to compute.
    """
    places = {layer: place for place, layer in enumerate(layers)}
    # a test for leaks, not a curve: two layers are enough
    two = {layer: places[layer] for layer in sorted({layers[len(layers) // 2], layers[-1]})}
    some, rest = list(seeds[:control_seeds]), list(seeds[control_seeds:])
    jobs: list[Job] = []
    for group, own_spans in _like(data, spans):
        first = group[0]

        def job(
            name: str, its_layers: dict[int, int], kinds: Sequence[str], its_seeds: list[int],
            group: list[ProbeData] = group, own_spans: np.ndarray = own_spans, first: ProbeData = first,
        ) -> Job:  # fmt: skip
            inputs = Inputs(states[name][0], own_spans, first.pair_starts, device)
            columns = [column_of(each, kind, label_seed) for kind in kinds for each in group]
            return Job(
                inputs,
                states[name][1],
                its_layers,
                columns,
                len(first.classes),
                first.pairs_in("train"),
                first.pairs_in("val"),
                first.pairs_in("test"),
                its_seeds,
            )

        # the control task reads the same batches as the task, so its states are gathered once
        jobs.append(job(MAIN, places, [MAIN, *(["control_task"] if "control_task" in controls else [])], some))
        jobs.append(job(MAIN, places, [MAIN], rest))
        if "shuffled" in controls:
            jobs.append(job(MAIN, two, ["shuffled"], some))
        for name, its_layers in (("random_encoder", places), ("random_embeddings", {0: 0})):
            if name in controls:
                jobs.append(job(name, its_layers, [name], some))
        if "surface" in controls and first.task.whole_text and first.slots == 2:
            jobs.append(_surface_job(group, some, device))
    return [job for job in jobs if job.seeds]


def column_of(data: ProbeData, control: str, seed: int) -> Column:
    """The labels of a task under a control."""
    labels = data.labels
    if control == "control_task":
        labels = control_labels(data.types, labels, data.target_parts == "train", len(data.classes), seed)
    elif control == "shuffled":
        labels = shuffled_labels(labels, data.target_parts, seed)
    return Column(data.task.name, control, labels)


def _like(data: Sequence[ProbeData], spans: Sequence[np.ndarray]) -> list[tuple[list[ProbeData], np.ndarray]]:
    """Tasks with the same pairs, parts, spans and number of classes."""
    groups: dict[str, tuple[list[ProbeData], np.ndarray]] = {}
    for own, own_spans in zip(data, spans, strict=True):
        digest = hashlib.blake2b(repr((len(own.classes), own.part.tolist(), own_spans.shape)).encode(), digest_size=16)
        for array in (own.pair_starts, own_spans):
            digest.update(np.ascontiguousarray(array).tobytes())
        groups.setdefault(digest.hexdigest(), ([], own_spans))[0].append(own)
    return list(groups.values())


def _surface_job(group: list[ProbeData], seeds: list[int], device: torch.device) -> Job:
    """Features of the texts instead of states: a probe of one span of one token."""
    data = group[0]
    features = np.array([surface_features(example.query, example.doc) for example in data.examples])
    rows = standardised(features, data.part == "train")
    places = np.arange(len(rows))
    spans = np.stack([places, places + 1], axis=1)[:, None]
    inputs = Inputs(TensorStates(torch.from_numpy(rows)[None].to(device)), spans, data.pair_starts, device)
    key = f"surface@1 {hashlib.blake2b(rows.tobytes(), digest_size=10).hexdigest()}"
    columns = [Column(own.task.name, "surface", own.labels) for own in group]
    return Job(
        inputs,
        key,
        {0: 0},
        columns,
        len(data.classes),
        data.pairs_in("train"),
        data.pairs_in("val"),
        data.pairs_in("test"),
        seeds,
    )
