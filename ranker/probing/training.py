"""Train a stack of probes with one optimizer. Clipping, learning rate and early stopping are separate per member."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.errors import ConfigError
from ranker.probing.batches import Batch, Inputs, SpanStates, evaluation_pairs, make_batches, read_spans
from ranker.probing.optimizer import Adam, Dropout
from ranker.probing.probes import EdgeProbe


@dataclass(frozen=True)
class TrainingOptions:
    """How a probe is trained. The validation loss is computed after each round.

    Args:
        lr: Adam's learning rate at the start.
        batch_pairs: Pairs per batch.
        max_rounds: Maximum number of rounds.
        round_steps: Minimum steps of a round. A round is the smallest number of whole passes over the training pairs
            with at least that many steps.
        patience: Training stops after this many consecutive rounds without a lower validation loss.
        small_val_pairs: Maximum validation pairs for portions below 5 % of the training pairs; None: all.
        lr_factor: Factor on the learning rate after each round without a lower validation loss.
        clip: Maximum norm of a member's gradient.
        hidden: Size of a projected span and of the hidden layer.
        dropout: Dropout rate before the output layer.
        head: `edge`, `mlp2` or `linear`.

    Raises:
        ConfigError: A value is out of its range.
    """

    lr: float = 1e-3
    batch_pairs: int = 64
    max_rounds: int = 50
    round_steps: int = 5
    patience: int = 2
    small_val_pairs: int | None = 2000
    lr_factor: float = 0.5
    clip: float = 5.0
    hidden: int = 256
    dropout: float = 0.3
    head: str = "edge"

    def __post_init__(self) -> None:
        for name, least in (("batch_pairs", 1), ("max_rounds", 1), ("round_steps", 1), ("patience", 1), ("hidden", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"training.{name}: expected at least {least}, got {getattr(self, name)}")
        if self.small_val_pairs is not None and self.small_val_pairs < 1:
            raise ConfigError(f"training.small_val_pairs: expected at least 1 or null, got {self.small_val_pairs}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"training.dropout: expected at least 0 and below 1, got {self.dropout}")
        if not self.lr > 0:
            raise ConfigError(f"training.lr: expected a number above 0, got {self.lr}")
        if not self.clip > 0:
            raise ConfigError(
                f"training.clip: expected a number above 0, got {self.clip}; set training.clip=.inf to clip nothing"
            )
        if not 0 < self.lr_factor <= 1:
            raise ConfigError(
                f"training.lr_factor: expected above 0 and at most 1, got {self.lr_factor}; 1 keeps the rate"
            )


@dataclass(frozen=True)
class Stack:
    """The probes that are trained together.

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


def fit(
    probe: EdgeProbe,
    inputs: Inputs,
    stack: Stack,
    train: np.ndarray,
    val: np.ndarray,
    options: TrainingOptions,
    portion: int,
) -> Fitted:
    """Train every member on its seed's pairs and keep the weights with its lowest validation loss.

    Args:
        probe: Shape of the probes.
        inputs: States, spans and pairs.
        stack: The members.
        train: Training pairs, int64 [seeds, pairs].
        val: Validation pairs, int64 [1 or seeds, pairs]; if empty, the last weights are kept.
        options: How the probes are trained.
        portion: Number of the portion; seed, portion and epoch decide the batch order.
    """
    with warnings.catch_warnings():
        # autograd prefers contiguous leaves, but these are slices of one matrix
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        return _fit(probe, inputs, stack, train, val, options, portion)


class _EarlyStopping:
    """Best weights, rate and patience of each member of a stack. All tensors have one entry per member, on the CPU.

    Args:
        parameters: Initial parameters, float32 [members, parameters].
        uniform_loss: Loss of the uniform code, log k. The initial weights give that code (`EdgeProbe.initial`).
        options: Patience and rate factor.
    """

    def __init__(self, parameters: Tensor, uniform_loss: float, options: TrainingOptions) -> None:
        size = len(parameters)
        self.options = options
        self.best = parameters.clone()
        self.epochs = torch.zeros(size)
        self.members = torch.arange(size)  # indices of the members that are still in the optimizer
        # so that the initial weights are kept if training on few pairs gives a worse code than the uniform one
        self._lowest = torch.full((size,), uniform_loss, dtype=torch.float64)
        self._bad_rounds = torch.zeros(size, dtype=torch.int64)

    def count_epoch(self, epoch: int) -> None:
        """Record `epoch` as the number of epochs of each member that still trains."""
        training = self._bad_rounds[self.members] < self.options.patience
        self.epochs[self.members] = torch.where(training, float(epoch), self.epochs[self.members])

    def keep_last(self, parameters: Tensor) -> None:
        """Keep the current weights [members in the optimizer, parameters]; used without validation pairs."""
        self.best[self.members] = parameters

    def update(self, loss: Tensor, optimizer: Adam) -> Tensor:
        """Keep the weights of improved members; lower the others' learning rate, to 0 for members that stop.

        Args:
            loss: Validation loss of each member in the optimizer, float64 [members].
            optimizer: The optimizer.

        Returns:
            True at members that stop, bool [members].
        """
        members, device = self.members, self.best.device
        training = self._bad_rounds[members] < self.options.patience
        better = (loss < self._lowest[members]) & training
        self._lowest[members] = torch.where(better, loss, self._lowest[members])
        chosen = better.nonzero().squeeze(1)
        self.best[members[chosen].to(device)] = optimizer.parameters[chosen.to(device)]
        self._bad_rounds[members] = torch.where(better, 0, self._bad_rounds[members] + training.long())
        optimizer.rates.mul_(torch.where(better, 1.0, self.options.lr_factor).to(device).unsqueeze(1))
        stopped = self._bad_rounds[members] >= self.options.patience
        if not stopped.all():
            optimizer.rates[stopped.to(device)] = 0.0
        return stopped


def _fit(
    probe: EdgeProbe,
    inputs: Inputs,
    stack: Stack,
    train: np.ndarray,
    val: np.ndarray,
    options: TrainingOptions,
    portion: int,
) -> Fitted:
    layers, seeds, num_sets = stack.shape
    device, reader = inputs.device, partial(read_spans, inputs, stack.layers)
    initial = torch.stack([probe.initial(seed) for seed in stack.seeds]).to(device)
    optimizer = Adam(initial[None, :, None].repeat(layers, 1, num_sets, 1).flatten(0, 2), options.lr, options.clip)
    dropout = _dropout(stack, inputs, options)
    stopping = _EarlyStopping(optimizer.parameters, math.log(probe.classes), options)
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
        if not training_sets.all():  # remove label sets all of whose members have stopped
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
    """Leaf tensors by name. They and their gradients are views of the optimizer's flat matrices.

    The optimizer thus updates one matrix instead of many tensors.
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
    """Mean cross entropy of each member over its targets, [layers, seeds, label sets]."""
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
    """Mean cross entropy over all targets of some batches, without dropout.

    Args:
        probe: Shape of the probes.
        flat: Parameters, float32 [layers, seeds, label sets, parameters].
        labels: int64 [label sets, all targets].
        batches: Batches with their spans. A batch of one seed is used for all seeds.

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
    """Parameters and labels for a batch. If all seeds share it, they become label sets, to gather its states once."""
    layers, seeds, label_sets, size = flat.shape
    if batch.targets.shape[0] == seeds:
        return flat, labels
    return flat.view(layers, 1, seeds * label_sets, size), labels.repeat(seeds, 1)


@torch.no_grad()
def log_probabilities(
    probe: EdgeProbe, flat: Tensor, inputs: Inputs, layers: Sequence[int], pairs: np.ndarray
) -> Iterator[tuple[Batch, Tensor]]:
    """Log-probabilities of the classes (natural logarithm), without dropout.

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
