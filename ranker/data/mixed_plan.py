"""Choose the groups of each optimizer step of a mix, as a function of (seed, epoch, step) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ranker.data.shares import spread
from ranker.data.step_plan import HashedOrder, StepPlan, group_order

_KEPT_ORDERS = 2  # for each set, because a step may end one pass over the set and begin the next pass


@dataclass(frozen=True)
class Part:
    """The groups of one set in a step.

    Args:
        set_index: Number of the set.
        draw: Number of the pass over the set. The docs of these groups are drawn with this number as the epoch.
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
        plans: The plan of each set, with its number of groups and its seed; all plans have the same size of a step.
        counts: Groups of each set in an epoch.
        one_set: Whether all groups of a step are from one set; then the last step of a set in an epoch may have fewer
            groups.
    """

    def __init__(self, plans: Sequence[StepPlan], counts: Sequence[int], one_set: bool = False) -> None:
        self.plans, self.counts, self.one_set = tuple(plans), tuple(counts), one_set
        # a micro-batch may have groups of any set, so the largest budget is used
        self.seed, self.micro_batches = plans[0].seed, max(plans, key=lambda plan: plan.max_tokens).micro_batches
        self.groups_per_step = plans[0].groups_per_step
        # for steps with groups of one set: number of steps of each set in an epoch
        self._set_steps = [-(-count // self.groups_per_step) for count in counts]
        self._orders: dict[int, dict[int, np.ndarray | HashedOrder]] = {}

    def __len__(self) -> int:
        return sum(self._set_steps) if self.one_set else -(-sum(self.counts) // self.groups_per_step)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return for each set the range (first, end) of its groups of the epoch that are in step `index`."""
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
        """Return the groups of a step, set by set. The result is the same on every device."""
        return [
            part
            for i, (start, end) in enumerate(self.ranges(index))
            if end > start
            for part in self._taken(i, epoch * self.counts[i] + start, epoch * self.counts[i] + end)
        ]

    def _taken(self, set_index: int, start: int, end: int) -> list[Part]:
        """Return the groups `start` to `end` of a set's stream, with a part for each pass."""
        size, parts = self.plans[set_index].num_groups, []
        while start < end:
            number, first = divmod(start, size)
            last = min(size, first + end - start)
            parts.append(Part(set_index, number, np.asarray(self._order(set_index, number)[first:last])))
            start += last - first
        return parts

    def _order(self, set_index: int, number: int) -> np.ndarray | HashedOrder:
        """Return the order of the groups in a pass over a set."""
        orders = self._orders.setdefault(set_index, {})
        if number not in orders:
            for old in sorted(orders)[: len(orders) + 1 - _KEPT_ORDERS]:
                del orders[old]
            plan = self.plans[set_index]
            orders[number] = group_order(plan.num_groups, plan.seed, number)
        return orders[number]
