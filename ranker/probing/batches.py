"""What probes read, batch by batch: the targets of each seed's pairs, and the states of their spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ranker.probing.states import States

GATHER_BYTES = 256 << 20  # states gathered at a time when nothing is trained
CHUNK_TOKENS = 2048  # states read at a time on a CPU, so that they stay in its cache while they are worked on


@dataclass(frozen=True)
class Inputs:
    """What probes read of each target.

    Args:
        states: Vectors of tokens.
        spans: First and one past last token of each span, int64 [targets, slots, 2].
        pair_starts: Targets of pair i are those from `pair_starts[i]` to `pair_starts[i + 1]`, int64 [pairs + 1].
        device: Where to compute.
    """

    states: States
    spans: np.ndarray
    pair_starts: np.ndarray
    device: torch.device

    def targets_of(self, pairs: np.ndarray) -> np.ndarray:
        """The targets of some pairs, pair by pair, int64 [targets]."""
        counts = self.pair_starts[pairs + 1] - self.pair_starts[pairs]
        first = np.repeat(self.pair_starts[pairs] - np.cumsum(counts) + counts, counts)
        return first + np.arange(int(counts.sum()))


@dataclass(frozen=True)
class Batch:
    """Targets for each seed of a stack, those with the longest spans first.

    Args:
        targets: int64 [seeds, targets].
        real: False where a seed has fewer targets than another, bool [seeds, targets].
        places: The same targets on the host, where spans are looked up.
    """

    targets: Tensor
    real: Tensor
    places: np.ndarray


def make_batches(inputs: Inputs, pairs: np.ndarray, size: int) -> Iterator[Batch]:
    """Cut each seed's pairs [seeds, pairs] into batches of `size`, in the order given."""
    totals = (inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1)
    for first in range(0, pairs.shape[1], size):
        rows = [inputs.targets_of(own[first : first + size]) for own in pairs]
        rows = [row[np.argsort(-totals[row], kind="stable")] for row in rows]
        most = max(map(len, rows))
        targets = np.stack([np.pad(row, (0, most - len(row)), mode="edge") for row in rows])
        real = np.arange(most) < np.array([len(row) for row in rows])[:, None]
        yield Batch(torch.from_numpy(targets).to(inputs.device), torch.from_numpy(real).to(inputs.device), targets)


@dataclass(frozen=True)
class SpanStates:
    """The spans of a slot for some consecutive targets of a batch; their states are copied when they are asked for.

    Args:
        source: Where the states are.
        layers: Positions on its layer axis.
        tokens: Positions on its token axis, int64 [seeds, targets, tokens]; padding repeats a span's first token.
        mask: True at real tokens, bool [seeds, targets, tokens].
    """

    source: States
    layers: Sequence[int]
    tokens: Tensor
    mask: Tensor

    def read(self) -> Tensor:
        """The states, float32 [layers, seeds, targets, tokens, dim]."""
        return self.source.gather(self.layers, self.tokens)


def read_spans(inputs: Inputs, layers: Sequence[int], batch: Batch) -> list[list[SpanStates]]:
    """Each slot's spans of a batch; on a CPU a few targets at a time, which saves padding, too, since the longest stand first."""
    read: list[list[SpanStates]] = []
    for slot in range(inputs.spans.shape[1]):
        bounds = inputs.spans[batch.places, slot]  # [seeds, targets, 2]
        start, length = bounds[..., :1], bounds[..., 1:] - bounds[..., :1]
        at_once = max(1, CHUNK_TOKENS // int(length.max())) if inputs.device.type == "cpu" else length.shape[1]
        chunks = []
        for first in range(0, length.shape[1], at_once):
            own_start, own_length = start[:, first : first + at_once], length[:, first : first + at_once]
            within = np.arange(int(own_length.max()))
            mask = within < own_length
            tokens = torch.from_numpy(own_start + within * mask).to(inputs.device)
            chunks.append(SpanStates(inputs.states, layers, tokens, torch.from_numpy(mask).to(inputs.device)))
        read.append(chunks)
    return read


def pairs_at_once(inputs: Inputs, layers: int) -> int:
    """How many pairs to read at a time when nothing is trained, so that memory stays bounded."""
    longest = int((inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1).max(initial=1))
    targets_a_pair = max(1, int(np.diff(inputs.pair_starts).max(initial=1)))
    return max(1, min(512, GATHER_BYTES // (4 * layers * inputs.states.dim * longest * targets_a_pair)))
