"""Make batches for probes that are trained together, which are called a stack.

A target is one labelled item: one or two spans of text. Its slots are its first and its second span. For each seed, a
batch has the targets of some pairs, and the token states of the targets' spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import ranges
from ranker.probing.state_readers import States

GATHER_BYTES = 256 << 20  # maximum bytes of states gathered at a time during evaluation
CHUNK_TOKENS = 2048  # number of states that a CPU reads at a time, few enough for its cache


def targets_of_pairs(pair_starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the indices of the targets of some pairs, pair by pair.

    Args:
        pair_starts: Pair i has the targets from `pair_starts[i]` to `pair_starts[i + 1]`, int64 [all pairs + 1].
        pairs: Indices of the pairs, int64 [pairs].

    Returns:
        int64 [targets]

    >>> targets_of_pairs(np.array([0, 2, 3, 6]), np.array([2, 0])).tolist()
    [3, 4, 5, 0, 1]
    """
    return ranges(pair_starts[pairs], pair_starts[pairs + 1] - pair_starts[pairs])


@dataclass(frozen=True)
class Inputs:
    """Token states, and the spans of each target, whose states a probe reads.

    Args:
        states: Token states.
        spans: Start and end (exclusive) token of each span, int64 [targets, slots, 2].
        pair_starts: Pair i has the targets from `pair_starts[i]` to `pair_starts[i + 1]`, int64 [pairs + 1].
        device: Device to compute on.
    """

    states: States
    spans: np.ndarray
    pair_starts: np.ndarray
    device: torch.device

    def targets_of(self, pairs: np.ndarray) -> np.ndarray:
        """Return the targets of some pairs, pair by pair, int64 [targets]."""
        return targets_of_pairs(self.pair_starts, pairs)


@dataclass(frozen=True)
class Batch:
    """The targets of each seed of a stack, sorted by the length of their spans, longest first.

    Args:
        targets: Indices of the targets, int64 [seeds, targets].
        real: False at padding, which fills up seeds that have fewer targets than another seed, bool [seeds, targets].
        host_targets: `targets` in host memory, to look up spans, int64 [seeds, targets].
    """

    targets: Tensor
    real: Tensor
    host_targets: np.ndarray


def make_batches(inputs: Inputs, pairs: np.ndarray, size: int) -> Iterator[Batch]:
    """Split each seed's pairs into batches, in the given order.

    Args:
        inputs: Spans and pairs.
        pairs: Indices of pairs, int64 [seeds, pairs].
        size: Pairs per batch; the last batch may have fewer.
    """
    span_tokens = (inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1)
    for first in range(0, pairs.shape[1], size):
        rows = [inputs.targets_of(seed_pairs[first : first + size]) for seed_pairs in pairs]
        rows = [row[np.argsort(-span_tokens[row], kind="stable")] for row in rows]
        width = max(map(len, rows))
        targets = np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
        real = np.arange(width) < np.array([len(row) for row in rows])[:, None]
        yield Batch(torch.from_numpy(targets).to(inputs.device), torch.from_numpy(real).to(inputs.device), targets)


@dataclass(frozen=True)
class SpanStates:
    """One span (the first or the second) of each of some consecutive targets; `read` copies the states of these spans.

    Args:
        source: The token states.
        layers: Indices on the layer axis of `source`.
        tokens: Indices on the token axis, int64 [seeds, targets, tokens]; padding repeats a span's first token.
        mask: True at real tokens, bool [seeds, targets, tokens].
    """

    source: States
    layers: Sequence[int]
    tokens: Tensor
    mask: Tensor

    def read(self) -> Tensor:
        """Return the states, float32 [layers, seeds, targets, tokens, dim]."""
        return self.source.gather(self.layers, self.tokens)


def read_spans(inputs: Inputs, layers: Sequence[int], batch: Batch) -> list[list[SpanStates]]:
    """Return, for each slot, the spans of a batch in chunks of consecutive targets.

    A GPU gets one chunk per slot. A CPU gets chunks of few targets, which fit its cache. Small chunks also need less
    padding, because the targets are sorted by length.
    """
    slots: list[list[SpanStates]] = []
    for slot in range(inputs.spans.shape[1]):
        bounds = inputs.spans[batch.host_targets, slot]  # [seeds, targets, 2]
        start, length = bounds[..., :1], bounds[..., 1:] - bounds[..., :1]
        width = length.shape[1]
        chunk_targets = max(1, CHUNK_TOKENS // int(length.max())) if inputs.device.type == "cpu" else width
        chunks = []
        for first in range(0, width, chunk_targets):
            chunk_start, chunk_length = (
                start[:, first : first + chunk_targets],
                length[:, first : first + chunk_targets],
            )
            within = np.arange(int(chunk_length.max()))
            mask = within < chunk_length
            tokens = torch.from_numpy(chunk_start + within * mask).to(inputs.device)
            chunks.append(SpanStates(inputs.states, layers, tokens, torch.from_numpy(mask).to(inputs.device)))
        slots.append(chunks)
    return slots


def evaluation_pairs(inputs: Inputs, layers: int) -> int:
    """Return the number of pairs per evaluation batch: at most 512, and with at most `GATHER_BYTES` of states."""
    longest = int((inputs.spans[:, :, 1] - inputs.spans[:, :, 0]).sum(axis=1).max(initial=1))
    targets_per_pair = max(1, int(np.diff(inputs.pair_starts).max(initial=1)))
    return max(1, min(512, GATHER_BYTES // (4 * layers * inputs.states.dim * longest * targets_per_pair)))
