"""Training a stack of probes: one optimiser for all, but each member with its own clipping, rate, early stop and best weights."""

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
from ranker.probing.batches import Batch, Inputs, SpanStates, make_batches, pairs_at_once, read_spans
from ranker.probing.optimizer import Adam, Dropout
from ranker.probing.probes import EdgeProbe


@dataclass(frozen=True)
class TrainingOptions:
    """How a probe is trained; a round is the time between two looks at the validation loss.

    Args:
        lr: Adam's rate at the start.
        batch_pairs: Pairs of a batch.
        max_rounds: Rounds at most.
        round_steps: A round is one pass over the training pairs, or as many as make this number of steps where that is
            more.
        patience: Stop after so many rounds without a lower validation loss.
        small_val_pairs: Validation pairs looked at where less than 5 % of the training pairs are trained on; None: all.
        lr_factor: After each such round the rate is multiplied by this.
        clip: Largest norm of a member's gradient.
        hidden: Size of a projected span and of the hidden layer.
        dropout: Dropout before the output layer.
        head: `edge`, `mlp2` or `linear`.
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
    """Which probes are trained together.

    Args:
        layers: Positions on the states' layer axis.
        seeds: Seed of each batch order and of the initial weights.
        keys: Seed of each member's dropout, [layers][seeds][columns].
        labels: Class of each target, int64 [columns, targets].
    """

    layers: Sequence[int]
    seeds: Sequence[int]
    keys: Sequence[Sequence[Sequence[int]]]
    labels: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Members by layer, seed and column."""
        return len(self.layers), len(self.seeds), len(self.labels)


@dataclass(frozen=True)
class Fitted:
    """Best weights of each member, float32 [layers, seeds, columns, parameters], and the passes over the training pairs it took."""

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
    """Train every member on its seed's pairs and keep its best weights by validation loss.

    Args:
        probe: Shape of the probes.
        inputs: States, spans and pairs.
        stack: The members.
        train: Pairs to train on, int64 [seeds, pairs].
        val: Pairs to look at after each round, int64 [1 or seeds, pairs]; without any, the last weights are kept.
        options: Rates and limits.
        portion: Number of the portion; with the seed it decides the batch order.
    """
    with warnings.catch_warnings():
        # the leaves are slices of one matrix, which autograd would rather have dense
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        return _fit(probe, inputs, stack, train, val, options, portion)


def _fit(
    probe: EdgeProbe,
    inputs: Inputs,
    stack: Stack,
    train: np.ndarray,
    val: np.ndarray,
    options: TrainingOptions,
    portion: int,
) -> Fitted:
    layers, seeds, columns = stack.shape
    reader = partial(read_spans, inputs, stack.layers)
    start = torch.stack([probe.initial(seed) for seed in stack.seeds]).to(inputs.device)
    flat = start[None, :, None].repeat(layers, 1, columns, 1).flatten(0, 2)
    optimizer = Adam(flat, options.lr, options.clip)
    most = int(np.sort(np.diff(inputs.pair_starts))[::-1][: options.batch_pairs].sum())
    keys = [key for by_seed in stack.keys for by_column in by_seed for key in by_column]
    dropout = Dropout(keys, options.dropout if options.head == "edge" else 0.0, (most, options.hidden), inputs.device)
    labels, active = stack.labels, torch.arange(columns)
    best, epochs = flat.clone(), torch.zeros(layers * seeds * columns)
    # untrained weights are the uniform code, see EdgeProbe.initial; a few pairs may not better it
    lowest = torch.full((layers * seeds * columns,), math.log(probe.classes), dtype=torch.float64)
    bad = torch.zeros(layers * seeds * columns, dtype=torch.int64)
    members = torch.arange(layers * seeds * columns)  # the stack's number of each member that still trains
    batches_per_epoch = -(-train.shape[1] // options.batch_pairs)
    epochs_per_round = -(-options.round_steps // batches_per_epoch)
    val_batches = (
        [(batch, reader(batch)) for batch in make_batches(inputs, val, pairs_at_once(inputs, layers))]
        if val.size
        else []
    )
    epoch = 0
    for _ in range(options.max_rounds):
        shape = (layers, seeds, len(active))
        views = _leaves(probe, optimizer, shape)
        for _ in range(epochs_per_round):
            order = np.stack(
                [np.random.default_rng([seed, portion, epoch]).permutation(train.shape[1]) for seed in stack.seeds]
            )
            epoch += 1
            for batch in make_batches(inputs, np.take_along_axis(train, order, axis=1), options.batch_pairs):
                kept = dropout(batch.targets.shape[1])
                kept = None if kept is None else kept.unflatten(0, shape)
                optimizer.gradient.zero_()
                losses = _losses(probe, views, reader(batch), labels, batch, kept)
                losses.sum().backward()
                optimizer.step()
        epochs[members] = torch.where(bad[members] < options.patience, float(epoch), epochs[members])
        if not val_batches:
            best[members] = optimizer.parameters
            continue
        loss = mean_loss(probe, optimizer.parameters.view(*shape, -1), labels, val_batches).flatten().cpu()
        alive = bad[members] < options.patience
        better = (loss < lowest[members]) & alive
        lowest[members] = torch.where(better, loss, lowest[members])
        chosen = better.nonzero().squeeze(1)
        best[members[chosen].to(best.device)] = optimizer.parameters[chosen.to(best.device)]
        bad[members] = torch.where(better, 0, bad[members] + alive.long())
        optimizer.rates.mul_(torch.where(better, 1.0, options.lr_factor).to(inputs.device).unsqueeze(1))
        done = bad[members] >= options.patience
        if done.all():
            break
        optimizer.rates[done.to(inputs.device)] = 0.0
        going = (~done.view(shape)).any(dim=0).any(dim=0)
        if not going.all():  # leave out the columns that no layer and no seed still trains
            local = torch.arange(len(done)).view(shape)[..., going].flatten()
            optimizer.keep(local.to(inputs.device))
            dropout.keep(local)
            members, active, labels = members[local], active[going], labels[going.to(labels.device)]
    return Fitted(best.view(layers, seeds, columns, -1), epochs.view(layers, seeds, columns))


def _leaves(probe: EdgeProbe, optimizer: Adam, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Leaves that share memory with the flat parameters, and their gradients with the flat gradient: the optimiser's steps are then few."""
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
    kept: Tensor | None,
) -> Tensor:
    """Mean cross entropy of each member over its targets, [layers, seeds, columns]."""
    logits = probe.logits(views, spans, kept)
    truth = (
        labels[:, batch.targets].transpose(0, 1).expand(logits.shape[0], -1, -1, -1)
    )  # [layers, seeds, columns, targets]
    costs = functional.cross_entropy(logits.flatten(0, 3), truth.reshape(-1), reduction="none").view(truth.shape)
    real = batch.real.unsqueeze(1)
    return (costs * real).sum(dim=-1) / real.sum(dim=-1)


@torch.no_grad()
def mean_loss(
    probe: EdgeProbe, flat: Tensor, labels: Tensor, batches: Sequence[tuple[Batch, list[list[SpanStates]]]]
) -> Tensor:
    """Mean cross entropy over all targets of batches with their spans, float64 [layers, seeds, columns]; those of one seed serve all."""
    layers, seeds, columns, _ = flat.shape
    total = torch.zeros(layers, seeds, columns, dtype=torch.float64, device=flat.device)
    count = torch.zeros(1, 1, 1, dtype=torch.float64, device=flat.device)
    for batch, spans in batches:
        own, own_labels = _for_batch(flat, labels, batch)
        losses = _losses(probe, probe.split(own), spans, own_labels, batch, None).view(layers, seeds, columns)
        size = batch.real.sum(dim=1).double()
        size = size.view(1, -1, 1)
        total, count = total + losses.double() * size, count + size
    return total / count


def _for_batch(flat: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where one batch serves all seeds, seeds become columns, so that its states are gathered once."""
    layers, seeds, columns, size = flat.shape
    if batch.targets.shape[0] == seeds:
        return flat, labels
    return flat.view(layers, 1, seeds * columns, size), labels.repeat(seeds, 1)


@torch.no_grad()
def log_probabilities(
    probe: EdgeProbe, flat: Tensor, inputs: Inputs, layers: Sequence[int], pairs: np.ndarray
) -> Iterator[tuple[Batch, Tensor]]:
    """Log-probabilities (natural, float32) of the classes for the targets of pairs [1 or seeds, pairs], dropout off.

    Yields:
        A batch and its [layers, seeds, columns, targets, classes].
    """
    reader = partial(read_spans, inputs, layers)
    nothing = torch.zeros(flat.shape[2], 0, dtype=torch.int64, device=flat.device)
    for batch in make_batches(inputs, pairs, pairs_at_once(inputs, len(layers))):
        own, _ = _for_batch(flat, nothing, batch)
        logits = probe.logits(probe.split(own), reader(batch))
        yield batch, logits.reshape(*flat.shape[:3], *logits.shape[3:]).float().log_softmax(dim=-1)
