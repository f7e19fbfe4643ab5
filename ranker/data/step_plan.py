"""Plan the optimizer steps: choose the groups of each step, and divide them among devices and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ranker.errors import DataError
from ranker.hashing import mix

_MAX_PERMUTED_GROUPS = 1 << 24  # for more groups, the order is not stored but computed on access (`HashedOrder`)


def deal(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Distribute items over bins, largest item first, each to the bin with the smallest sum.

    Args:
        sizes: Size of each item.
        bins: Number of bins.

    Returns:
        Indices of the items in each bin.

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    load, out = [0] * bins, [[] for _ in range(bins)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(bins), key=lambda b: (load[b], b))
        load[lightest] += sizes[item]
        out[lightest].append(item)
    return out


def fill(order: np.ndarray, sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Split `order` into consecutive batches of at most `max_tokens`; an item over the budget is a batch by itself.

    Args:
        order: The items, in the order of the batches [items].
        sizes: Number of tokens of each entry of `order`, integers [items].
        max_tokens: Token budget of a batch.

    >>> fill(np.array([3, 1, 2]), np.array([5, 4, 9]), 10)
    [array([3, 1]), array([2])]
    """
    batches, start, load = [], 0, 0
    for i, size in enumerate(sizes.tolist()):
        if load + size > max_tokens and i > start:
            batches.append(order[start:i])
            start, load = i, 0
        load += size
    return [*batches, order[start:]] if len(order) else batches


class HashedOrder:
    """A shuffle of `range(size)` that takes no memory, because it is computed on access.

    A Feistel cipher permutes the smallest range that contains all values and whose size is a power of 4. The cipher is
    applied repeatedly until the value is below `size` (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002, method 3). The round function is `mix`.

    >>> order = HashedOrder(1000, seed=0, epoch=0)
    >>> sorted(order[0:1000].tolist()) == list(range(1000)), order[10:12].tolist() == order[0:1000][10:12].tolist()
    (True, True)
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))

    def __getitem__(self, part: slice) -> np.ndarray:
        values = self._encipher(np.arange(*part.indices(self.size), dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encipher(values[outside])
        return values.astype(np.int64)

    def _encipher(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = values >> self._half_bits, values & mask
        for number in range(4):
            left, right = right, left ^ (mix(self.seed, self.epoch, number, right) & mask)
        return left << self._half_bits | right


def group_order(num_groups: int, seed: int, epoch: int) -> np.ndarray | HashedOrder:
    """Return the epoch's order of groups. For very many groups (MS MARCO's triples), the order takes no memory."""
    if num_groups > _MAX_PERMUTED_GROUPS:
        return HashedOrder(num_groups, seed, epoch)
    return np.random.default_rng([seed, epoch]).permutation(num_groups)


_order = lru_cache(maxsize=2)(group_order)


@dataclass(frozen=True)
class StepPlan:
    """The optimizer steps of an epoch.

    The configuration alone decides which groups a step has. Devices and memory decide only how the step is split.

    Args:
        num_groups: Number of groups in the training set.
        groups_per_step: Number of groups per optimizer step, over all devices; the last step of an epoch may have fewer
            groups.
        max_tokens: Token budget of a micro-batch on one device.
        seed: Seed of the shuffle.
        min_micro_batches: Smallest number of micro-batches per device and step, if there are enough groups.
    """

    num_groups: int
    groups_per_step: int
    max_tokens: int
    seed: int = 0
    min_micro_batches: int = 1

    def __len__(self) -> int:
        return -(-self.num_groups // self.groups_per_step)

    def groups(self, epoch: int, step: int) -> np.ndarray:
        """Return the groups of a step, int64 [groups]; the order is the same on every device."""
        return _order(self.num_groups, self.seed, epoch)[
            step * self.groups_per_step : (step + 1) * self.groups_per_step
        ]

    def micro_batches(self, sizes: Sequence[int], rank: int, world: int) -> list[list[int]]:
        """Return this device's micro-batches; groups are numbered within the step.

        Args:
            sizes: Number of tokens of each group of the step.
            rank: Number of this device.
            world: Number of devices.

        Returns:
            Numbers of the groups of each micro-batch, ascending; [] if other devices get all groups.

        Raises:
            DataError: A single group is over the budget.
        """
        if max(sizes) > self.max_tokens:
            raise DataError(
                f"batch.max_tokens: expected at least {max(sizes)}, the tokens of the largest query group, "
                f"got {self.max_tokens}; raise it, or lower batch.docs or max_doc_tokens"
            )
        device_groups = deal(sizes, world)[rank]
        device_sizes = [sizes[group] for group in device_groups]
        bins = max(self.min_micro_batches, -(-sum(device_sizes) // self.max_tokens))
        while any(sum(device_sizes[i] for i in items) > self.max_tokens for items in deal(device_sizes, bins)):
            bins += 1
        return [sorted(device_groups[i] for i in items) for items in deal(device_sizes, bins) if items]
