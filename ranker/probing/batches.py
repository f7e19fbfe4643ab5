"""What probes read, batch by batch: the targets of each seed's pairs, and the states of their spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ranker.probing.states import States

GATHER_BYTES = 256 << 20  # states gathered at a time when nothing is trained
GROUPS = 4  # runs of like length in a batch


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
        groups: (first, last, longest span of each slot): targets to pad to one length. Host numbers, so that nothing waits for the device.
    """

    targets: Tensor
    real: Tensor
    groups: tuple[tuple[int, int, tuple[int, ...]], ...]


def make_batches(inputs: Inputs, pairs: np.ndarray, size: int) -> Iterator[Batch]:
    """Cut each seed's pairs [seeds, pairs] into batches of `size`, in the order given."""
    lengths = inputs.spans[:, :, 1] - inputs.spans[:, :, 0]
    totals = lengths.sum(axis=1)
    for first in range(0, pairs.shape[1], size):
        rows = [inputs.targets_of(own[first : first + size]) for own in pairs]
        rows = [row[np.argsort(-totals[row], kind="stable")] for row in rows]
        most = max(map(len, rows))
        targets = np.stack([np.pad(row, (0, most - len(row)), mode="edge") for row in rows])
        real = np.arange(most) < np.array([len(row) for row in rows])[:, None]
        # padding all to the longest would more than double the work on a CPU; on a GPU every group is one launch more
        parts = GROUPS if inputs.device.type == "cpu" and most >= 4 * GROUPS else 1
        cuts = [most * part // parts for part in range(parts + 1)]
        groups = tuple(
            (low, high, tuple(int(width) for width in lengths[targets[:, low:high]].max(axis=(0, 1)))) for low, high in pairwise(cuts)
        )
        yield Batch(torch.from_numpy(targets).to(inputs.device), torch.from_numpy(real).to(inputs.device), groups)


SpanStates = list[tuple[Tensor, Tensor]]


class SpanReader:
    """Gathers the states of a batch's spans for some layers."""

    def __init__(self, inputs: Inputs, layers: Sequence[int]) -> None:
        self.states, self.layers = inputs.states, list(layers)
        self._spans = torch.from_numpy(inputs.spans).to(inputs.device)
        self._arange = torch.arange(int((inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).max(initial=1)), device=inputs.device)

    def __call__(self, batch: Batch) -> list[SpanStates]:
        """Per slot and group the states [layers, seeds, targets, tokens, dim] and the mask [seeds, targets, tokens]."""
        slots = self._spans.shape[1]
        return [[self._read(batch.targets[:, low:high], slot, widths[slot]) for low, high, widths in batch.groups] for slot in range(slots)]

    def _read(self, targets: Tensor, slot: int, width: int) -> tuple[Tensor, Tensor]:
        bounds = self._spans[targets, slot]  # [seeds, targets, 2]
        start, length = bounds[..., :1], bounds[..., 1:] - bounds[..., :1]
        within = self._arange[:width].expand(*targets.shape, -1)
        mask = within < length
        return self.states.gather(self.layers, torch.where(mask, start + within, start)), mask


def pairs_at_once(inputs: Inputs, layers: int) -> int:
    """How many pairs to read at a time when nothing is trained, so that memory stays bounded."""
    longest = int((inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1).max(initial=1))
    targets_a_pair = max(1, int(np.diff(inputs.pair_starts).max(initial=1)))
    return max(1, min(512, GATHER_BYTES // (4 * layers * inputs.states.dim * longest * targets_a_pair)))
