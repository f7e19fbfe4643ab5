"""What probes read, batch by batch: the targets of each seed's pairs, and the states of their spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ranker.probing.states import States

GATHER_BYTES = 256 << 20  # states gathered at a time when nothing is trained
LONG = 12  # tokens of a span from which on slices are quicker than a padded copy


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
class Gathered:
    """The states of a slot's spans, copied and padded.

    Args:
        states: float32 [layers, seeds, targets, tokens, dim].
        mask: True at real tokens, bool [seeds, targets, tokens].
    """

    states: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Sliced:
    """The same for one layer and seed, as slices of all states, longest first: nothing is copied and nothing padded.

    Args:
        states: float32 [tokens, dim] of each target.
    """

    states: list[Tensor]


SpanStates = Gathered | Sliced


def read_spans(inputs: Inputs, layers: Sequence[int], batch: Batch) -> list[SpanStates]:
    """Read each slot's spans of a batch, in the way that is quicker."""
    read: list[SpanStates] = []
    rows = inputs.states.rows(layers[0]) if len(layers) == 1 and len(batch.places) == 1 else None
    for slot in range(inputs.spans.shape[1]):
        bounds = inputs.spans[batch.places, slot]  # [seeds, targets, 2]
        start, length = bounds[..., :1], bounds[..., 1:] - bounds[..., :1]
        if rows is not None and length.mean() > LONG:
            read.append(Sliced([rows[first:last].float() for first, last in bounds[0].tolist()]))
            continue
        within = np.arange(int(length.max()))
        mask = within < length
        tokens = torch.from_numpy(start + within * mask).to(inputs.device)
        read.append(Gathered(inputs.states.gather(layers, tokens), torch.from_numpy(mask).to(inputs.device)))
    return read


def pairs_at_once(inputs: Inputs, layers: int) -> int:
    """How many pairs to read at a time when nothing is trained, so that memory stays bounded."""
    longest = int((inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1).max(initial=1))
    targets_a_pair = max(1, int(np.diff(inputs.pair_starts).max(initial=1)))
    return max(1, min(512, GATHER_BYTES // (4 * layers * inputs.states.dim * longest * targets_a_pair)))
