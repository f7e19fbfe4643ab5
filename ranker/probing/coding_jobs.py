"""Data classes of the online code: label sets, jobs, portions, stacks of probes, outcomes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from ranker.probing.batches import Inputs
from ranker.probing.code_length import CodeLength
from ranker.probing.probes import EdgeProbe
from ranker.probing.training import Stack

Member = tuple[int, int, int]  # indices of a layer, a seed and a label set


@dataclass(frozen=True)
class LabelSet:
    """The labels of a task, or of a control.

    Args:
        task: Name of the task.
        control: `none`, or the control's name.
        labels: Class of each target, int64 [targets].
    """

    task: str
    control: str
    labels: np.ndarray


@dataclass(frozen=True)
class Job:
    """Label sets of the same targets. They are coded together, because their probes read the same states.

    Args:
        inputs: States, spans and pairs.
        states_key: Hash of everything that determines the states.
        layers: Layer to probe -> index of the layer on the states' layer axis.
        label_sets: Label sets, all with the same number of classes.
        classes: Number of classes.
        train: Indices of the training pairs, int64 [pairs].
        val: Indices of the validation pairs.
        test: Indices of the test pairs.
        seeds: Each seed gives a permutation of the training pairs and a set of initial weights.
    """

    inputs: Inputs
    states_key: str
    layers: dict[int, int]
    label_sets: Sequence[LabelSet]
    classes: int
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    seeds: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """The code and test results of one layer, seed and label set.

    Args:
        layer: The layer.
        seed: The seed.
        label_set: The label set.
        code: The description length.
        bits: Bits of each training target, float32 [training targets], sorted by target index. A target of the first
            block has log2(classes) bits.
        block_ends: End of each block, in targets, in this seed's order.
        block_bits: Bits of each block.
        predicted: Predicted class of each test target, after training on all training pairs.
        scores: Log-odds of class 1 against class 0 of each test target.
        accuracy: Accuracy on the test part.
        macro_f1: Macro F1 on the test part.
        epochs: Passes over the training pairs in the last training.
        seconds: Seconds for training and coding of the stack, divided by its number of members.
    """

    layer: int
    seed: int
    label_set: LabelSet
    code: CodeLength
    bits: np.ndarray
    block_ends: list[int]
    block_bits: list[float]
    predicted: np.ndarray
    scores: np.ndarray
    accuracy: float
    macro_f1: float
    epochs: float
    seconds: float


@dataclass(frozen=True)
class Portion:
    """The first training pairs in each seed's order, and the block that is encoded by probes trained on these pairs.

    Args:
        number: Number of the portion, from 0.
        start: The probes are trained on the first `start` pairs.
        end: The block ends with pair `end`. None: this is the last portion, whose probes classify the test pairs, which
            are not part of the code.
    """

    number: int
    start: int
    end: int | None


@dataclass(frozen=True)
class ProbeStack:
    """The layers and seeds of a job that one module trains.

    Args:
        job: The job.
        probe: Shape of the probes.
        layers: The layers.
        seeds: The seeds.
        order: Training pairs in each seed's order, int64 [seeds, pairs].
    """

    job: Job
    probe: EdgeProbe
    layers: list[int]
    seeds: list[int]
    order: np.ndarray

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers on the states' layer axis."""
        return [self.job.layers[layer] for layer in self.layers]

    @property
    def members(self) -> list[Member]:
        """Return the indices of layer, seed and label set of each member."""
        return list(product(range(len(self.layers)), range(len(self.seeds)), range(len(self.job.label_sets))))

    def training_stack(self, label_sets: Sequence[LabelSet], portion: Portion) -> Stack:
        """Return the members that `fit` trains, with the seed of each member's dropout."""
        names = [f"{labels.task}/{labels.control}" for labels in label_sets]
        keys = [
            [[_hash(layer, seed, portion.number, name) for name in names] for seed in self.seeds]
            for layer in self.layers
        ]
        labels = torch.from_numpy(np.stack([labels.labels for labels in label_sets]))
        return Stack(self.layer_indices, self.seeds, keys, labels.to(self.job.inputs.device))

    def coded_pairs(self, portion: Portion) -> np.ndarray:
        """Return the pairs of the portion's block, int64 [seeds, pairs]; of the last portion, test pairs [1, pairs]."""
        return self.job.test[None] if portion.end is None else self.order[:, portion.start : portion.end]


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
