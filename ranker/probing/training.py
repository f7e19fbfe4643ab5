"""Train a stack of probes with one optimizer.

Each probe (a member of the stack) has its own clipping, learning rate and early stopping.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.probing.batches import Batch, Inputs, SpanStates, evaluation_pairs, make_batches, read_spans
from ranker.probing.early_stopping import EarlyStopping
from ranker.probing.optimizer import Adam, Dropout
from ranker.probing.probes import EdgeProbe
from ranker.probing.training_options import TrainingOptions


@dataclass(frozen=True)
class Stack:
    """The probes that one optimizer trains.

    Args:
        layers: Indices on the states' layer axis.
        seeds: Seeds of batch order and initial weights.
        keys: Seed of each member's dropout, [layers][seeds][label sets].
        labels: Class of each target, int64 [label sets, targets].
    """

    layers: Sequence[int]
    seeds: Sequence[int]
    keys: Sequence[Sequence[Sequence[int]]]
    labels: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of layers, seeds and label sets."""
        return len(self.layers), len(self.seeds), len(self.labels)


@dataclass(frozen=True)
class Fitted:
    """Trained probes.

    Args:
        parameters: Best weights of each member, float32 [layers, seeds, label sets, parameters].
        epochs: Number of passes over the training pairs, float32 [layers, seeds, label sets].
    """

    parameters: Tensor
    epochs: Tensor


@contextmanager
def _without_layout_warning() -> Iterator[None]:
    """Silence autograd's warning about leaves that are not contiguous: a stack's leaves are slices of a matrix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        yield


@_without_layout_warning()
def fit(
    probe: EdgeProbe,
    inputs: Inputs,
    stack: Stack,
    train: np.ndarray,
    val: np.ndarray,
    options: TrainingOptions,
    portion: int,
) -> Fitted:
    """Train every member on its seed's pairs, and keep the weights with the member's lowest validation loss.

    Args:
        probe: Shape of the probes.
        inputs: States, spans and pairs.
        stack: The members.
        train: Training pairs, int64 [seeds, pairs].
        val: Validation pairs, int64 [1 or seeds, pairs]; if empty, the last weights are kept.
        options: How the probes are trained.
        portion: Number of the portion; seed, portion and epoch decide the batch order.
    """
    layers, seeds, num_sets = stack.shape
    device, reader = inputs.device, partial(read_spans, inputs, stack.layers)
    initial = torch.stack([probe.initial(seed) for seed in stack.seeds]).to(device)
    optimizer = Adam(initial[None, :, None].repeat(layers, 1, num_sets, 1).flatten(0, 2), options.lr, options.clip)
    dropout = _dropout(stack, inputs, options)
    stopping = EarlyStopping(optimizer.parameters, math.log(probe.classes), options)
    labels = stack.labels
    epochs_per_round = -(-options.round_steps // -(-train.shape[1] // options.batch_pairs))
    val_size = evaluation_pairs(inputs, layers)
    val_batches = [(batch, reader(batch)) for batch in make_batches(inputs, val, val_size)] if val.size else []
    epoch = 0
    for _ in range(options.max_rounds):
        shape = (layers, seeds, len(labels))
        views = _leaves(probe, optimizer, shape)
        for _ in range(epochs_per_round):
            orders = [np.random.default_rng([seed, portion, epoch]).permutation(train.shape[1]) for seed in stack.seeds]
            epoch += 1
            shuffled = np.take_along_axis(train, np.stack(orders), axis=1)
            for batch in make_batches(inputs, shuffled, options.batch_pairs):
                mask = dropout(batch.targets.shape[1])
                optimizer.gradient.zero_()
                mask = None if mask is None else mask.unflatten(0, shape)
                _losses(probe, views, reader(batch), labels, batch, mask).sum().backward()
                optimizer.step()
        stopping.count_epoch(epoch)
        if not val_batches:
            stopping.keep_last(optimizer.parameters)
            continue
        loss = mean_loss(probe, optimizer.parameters.view(*shape, -1), labels, val_batches).flatten().cpu()
        stopped = stopping.update(loss, optimizer)
        if stopped.all():
            break
        training_sets = (~stopped.view(shape)).any(dim=0).any(dim=0)
        if not training_sets.all():  # remove label sets without a member that still trains
            kept = torch.arange(len(stopped)).view(shape)[..., training_sets].flatten()
            optimizer.keep(kept.to(device))
            dropout.keep(kept)
            stopping.members, labels = stopping.members[kept], labels[training_sets.to(labels.device)]
    return Fitted(stopping.best.view(layers, seeds, num_sets, -1), stopping.epochs.view(layers, seeds, num_sets))


def _dropout(stack: Stack, inputs: Inputs, options: TrainingOptions) -> Dropout:
    keys = [key for by_seed in stack.keys for by_label_set in by_seed for key in by_label_set]
    most_targets = int(np.sort(np.diff(inputs.pair_starts))[::-1][: options.batch_pairs].sum())
    rate = options.dropout if options.head == "edge" else 0.0
    return Dropout(keys, rate, (most_targets, options.hidden), inputs.device)


def _leaves(probe: EdgeProbe, optimizer: Adam, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return leaf tensors by name. The tensors and their gradients are views of the optimizer's flat matrices.

    So the optimizer updates one matrix instead of many tensors.
    """
    views = probe.split(optimizer.parameters.view(*shape, -1))
    gradients = probe.split(optimizer.gradient.view(*shape, -1))
    leaves = {}
    for name, view in views.items():
        leaves[name] = view.detach().requires_grad_()
        leaves[name].grad = gradients[name]
    return leaves


def _losses(
    probe: EdgeProbe,
    views: dict[str, Tensor],
    spans: list[list[SpanStates]],
    labels: Tensor,
    batch: Batch,
    dropout_mask: Tensor | None,
) -> Tensor:
    """Return the mean cross entropy of each member over its targets, [layers, seeds, label sets]."""
    logits = probe.logits(views, spans, dropout_mask)
    # [layers, seeds, label sets, targets]
    truth = labels[:, batch.targets].transpose(0, 1).expand(logits.shape[0], -1, -1, -1)
    costs = functional.cross_entropy(logits.flatten(0, 3), truth.reshape(-1), reduction="none").view(truth.shape)
    real = batch.real.unsqueeze(1)
    return (costs * real).sum(dim=-1) / real.sum(dim=-1)


@torch.no_grad()
def mean_loss(
    probe: EdgeProbe, flat: Tensor, labels: Tensor, batches: Sequence[tuple[Batch, list[list[SpanStates]]]]
) -> Tensor:
    """Return the mean cross entropy over all targets of some batches, without dropout.

    Args:
        probe: Shape of the probes.
        flat: Parameters, float32 [layers, seeds, label sets, parameters].
        labels: int64 [label sets, all targets].
        batches: Batches with their spans. A batch with one seed is used for all seeds.

    Returns:
        float64 [layers, seeds, label sets]
    """
    layers, seeds, label_sets, _ = flat.shape
    total = torch.zeros(layers, seeds, label_sets, dtype=torch.float64, device=flat.device)
    count = torch.zeros(1, 1, 1, dtype=torch.float64, device=flat.device)
    for batch, spans in batches:
        members, member_labels = _for_batch(flat, labels, batch)
        losses = _losses(probe, probe.split(members), spans, member_labels, batch, None)
        size = batch.real.sum(dim=1).double().view(1, -1, 1)
        total, count = total + losses.view(layers, seeds, label_sets).double() * size, count + size
    return total / count


def _for_batch(flat: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return parameters and labels for a batch. Seeds that share the batch become label sets, to gather states once."""
    layers, seeds, label_sets, size = flat.shape
    if batch.targets.shape[0] == seeds:
        return flat, labels
    return flat.view(layers, 1, seeds * label_sets, size), labels.repeat(seeds, 1)


@torch.no_grad()
def log_probabilities(
    probe: EdgeProbe, flat: Tensor, inputs: Inputs, layers: Sequence[int], pairs: np.ndarray
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the log-probabilities (natural logarithm) of the classes, without dropout.

    Args:
        probe: Shape of the probes.
        flat: Parameters, float32 [layers, seeds, label sets, parameters].
        inputs: States, spans and pairs.
        layers: Indices on the states' layer axis.
        pairs: Pairs whose targets are classified, int64 [1 or seeds, pairs].

    Yields:
        A batch, and its log-probabilities, float32 [layers, seeds, label sets, targets, classes].
    """
    reader = partial(read_spans, inputs, layers)
    no_labels = torch.zeros(flat.shape[2], 0, dtype=torch.int64, device=flat.device)
    for batch in make_batches(inputs, pairs, evaluation_pairs(inputs, len(layers))):
        members, _ = _for_batch(flat, no_labels, batch)
        logits = probe.logits(probe.split(members), reader(batch))
        yield batch, logits.reshape(*flat.shape[:3], *logits.shape[3:]).float().log_softmax(dim=-1)
