"""Which groups of which sets are in an optimizer step of a mix; a function of (seed, epoch, step) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ranker.data.shares import spread
from ranker.data.step_plan import HashedOrder, StepPlan, group_order

_KEPT_ORDERS = 2  # per set: a step may end one pass over a set and begin the next


@dataclass(frozen=True)
class Part:
    """Groups of one set in a step.

    Args:
        set_index: The set.
        draw: Number of the pass over the set. It takes the place of the epoch when the docs of these groups are drawn.
        groups: Numbers of the groups within the set, int64 [groups].
    """

    set_index: int
    draw: int
    groups: np.ndarray


class MixedPlan:
    """The optimizer steps of an epoch over several sets.

    The groups of each set form a stream: shuffled passes over all groups, one after another. An epoch takes the next
    `counts[i]` groups of set i, and spreads them evenly over its steps. So an epoch may contain a part of a large set,
    or several passes over a small set. The next epoch continues where this one ended.

    Args:
        plans: Number of groups and seed of each set; the size of a step and its token budget are the same in all.
        counts: Groups of each set in an epoch.
        one_set: Whether all groups of a step are of one set; the last step of a set in an epoch may have fewer.
    """

    def __init__(self, plans: Sequence[StepPlan], counts: Sequence[int], one_set: bool = False) -> None:
        self.plans, self.counts, self.one_set = tuple(plans), tuple(counts), one_set
        # a micro-batch may hold groups of any set, so the largest budget counts
        self.seed, self.micro_batches = plans[0].seed, max(plans, key=lambda plan: plan.max_tokens).micro_batches
        self.groups_per_step = plans[0].groups_per_step
        # if each step has groups of one set only: number of steps of each set in an epoch
        self._set_steps = [-(-count // self.groups_per_step) for count in counts]
        self._orders: dict[int, dict[int, np.ndarray | HashedOrder]] = {}

    def __len__(self) -> int:
        return sum(self._set_steps) if self.one_set else -(-sum(self.counts) // self.groups_per_step)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the range (first, end) of each set's groups in the epoch that step `index` takes."""
        size = self.groups_per_step
        if self.one_set:
            before, after = spread(self._set_steps, index), spread(self._set_steps, index + 1)
            return [
                (min(start * size, count), min(end * size, count))
                for start, end, count in zip(before, after, self.counts, strict=True)
            ]
        total = sum(self.counts)
        ends = [spread(self.counts, min(number * size, total)) for number in (index, index + 1)]
        return list(zip(*ends, strict=True))

    def parts(self, epoch: int, index: int) -> list[Part]:
        """Return the groups of a step, set by set; the same on every device."""
        return [
            part
            for i, (start, end) in enumerate(self.ranges(index))
            if end > start
            for part in self._taken(i, epoch * self.counts[i] + start, epoch * self.counts[i] + end)
        ]

    def _taken(self, set_index: int, start: int, end: int) -> list[Part]:
        """The groups `start` to `end` of a set's stream, one part per pass."""
        size, parts = self.plans[set_index].num_groups, []
        while start < end:
            number, first = divmod(start, size)
            last = min(size, first + end - start)
            parts.append(Part(set_index, number, np.asarray(self._order(set_index, number)[first:last])))
            start += last - first
        return parts

    def _order(self, set_index: int, number: int) -> np.ndarray | HashedOrder:
        """The order of a pass over a set."""
        orders = self._orders.setdefault(set_index, {})
        if number not in orders:
            for old in sorted(orders)[: len(orders) + 1 - _KEPT_ORDERS]:
                del orders[old]
            plan = self.plans[set_index]
            orders[number] = group_order(plan.num_groups, plan.seed, number)
        return orders[number]
