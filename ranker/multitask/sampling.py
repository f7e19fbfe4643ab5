"""Decide how often each task is trained on, and draw the rows of each step, by (seed, epoch, step) alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ranker.data.step_plan import StepPlan
from ranker.hashing import mix
from ranker.multitask.options import TaskSampling

_PASS = 1 << 20  # in an epoch, pass n (from 0) over the ranking groups has the shuffle of epoch epoch + n * _PASS


def probabilities(sampling: TaskSampling, sizes: tuple[int, ...], epoch: int, num_epochs: int) -> np.ndarray:
    r"""Return the share of each task's rows, float64 [tasks]; ranking is the first task.

    proportional: p_t ~ N_t. uniform: 1 / T. temperature (Aharoni et al., 2019): p_t ~ min(N_t, cap)^(1 / tau). annealed
    (Stickland and Murray, 2019): p_t ~ N_t^a with a = 1 - 0.8 (e - 1) / (E - 1) over epochs e = 1 .. E.

    Args:
        sampling: The mode and its parameters.
        sizes: Number of rows of each task, N_t.
        epoch: Number of the epoch, from 0.
        num_epochs: E.

    >>> sampling = TaskSampling(mode="temperature", temperature=2, main_fraction=None)
    >>> probabilities(sampling, (10**6, 10**6, 10**4), 0, 1) * 21
    array([10., 10.,  1.])
    """
    if len(sizes) == 1:
        return np.ones(1)
    rows = np.array(sizes, dtype=np.float64)
    if sampling.mode == "proportional":
        weights = rows
    elif sampling.mode == "uniform":
        weights = np.ones(len(rows))
    elif sampling.mode == "temperature":
        weights = np.minimum(rows, sampling.cap or np.inf) ** (1 / sampling.temperature)
    else:
        weights = rows ** (1 - 0.8 * min(epoch, num_epochs - 1) / max(num_epochs - 1, 1))
    if sampling.main_fraction is None:
        return weights / weights.sum()
    others = weights[1:] / weights[1:].sum()
    return np.concatenate([[sampling.main_fraction], (1 - sampling.main_fraction) * others])


@dataclass(frozen=True)
class TaskPlan:
    """The optimizer steps of an epoch over all tasks; the configuration alone decides their content.

    A mixed step has the ranking groups of a training without auxiliary tasks, and so many auxiliary rows that ranking
    has its share. An epoch of mixed steps is one pass over the ranking groups. A homogeneous step has one task:
    `batch.queries` ranking groups, or as many auxiliary rows as these groups have rows. The number of homogeneous steps
    in an epoch is the number of ranking steps in a pass over the ranking groups, divided by the share of ranking in the
    first epoch. So one pass is expected.

    Args:
        ranking: Plan of the ranking groups.
        docs: Number of docs per group.
        sizes: Number of rows of each auxiliary task.
        sampling: Composition and shares.
        num_epochs: Number of epochs of the whole training, for annealing.
    """

    ranking: StepPlan
    docs: int
    sizes: tuple[int, ...]
    sampling: TaskSampling
    num_epochs: int = 1

    def __len__(self) -> int:
        if self.sampling.composition == "mixed" or not self.sizes:
            return len(self.ranking)
        return max(len(self.ranking), round(len(self.ranking) / self.shares(0)[0]))

    def until(self, max_epochs: int | None, max_steps: int) -> TaskPlan:
        """Return the plan of a training that ends after `max_epochs` or `max_steps`, whichever comes first.

        Args:
            max_epochs: Number of epochs; None: no limit.
            max_steps: Number of steps; -1: no limit.
        """
        ends = [max_epochs or 0, -(-max_steps // len(self))]
        return replace(self, num_epochs=min((end for end in ends if end > 0), default=1))

    @property
    def seed(self) -> int:
        """The seed of all shuffles."""
        return self.ranking.seed

    def shares(self, epoch: int) -> np.ndarray:
        """Return the share of each task's rows in an epoch, float64 [tasks]; ranking is the first task."""
        return probabilities(self.sampling, (self.ranking.num_groups * self.docs, *self.sizes), epoch, self.num_epochs)

    def groups(self, epoch: int, step: int) -> np.ndarray:
        """Return the ranking groups of a step, int64 [groups]; empty in a step of another task."""
        if self.sampling.composition == "mixed" or not self.sizes:
            return self.ranking.groups(epoch, step)
        counts, starts = _draws(self, epoch)
        if not counts[step, 0]:
            return np.zeros(0, dtype=np.int64)
        passes, ranking_step = divmod(int(starts[step, 0]), len(self.ranking))
        return self.ranking.groups(epoch + passes * _PASS, ranking_step)

    def rows(self, epoch: int, step: int) -> list[np.ndarray]:
        """Return the rows of each auxiliary task in a step, with an int64 array [rows] per task.

        Passes over a task's rows are shuffled, and a pass has each row once.
        """
        counts, starts = _draws(self, epoch)
        return [
            _in_order(size, self.ranking.seed, epoch, task, int(starts[step, 1 + task]), int(counts[step, 1 + task]))
            for task, size in enumerate(self.sizes)
        ]


@lru_cache(maxsize=4)
def _draws(plan: TaskPlan, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each step of an epoch whether it is a ranking step, and its number of rows of each auxiliary task.

    Returns:
        The counts of each step, and the sums of the counts of all earlier steps of the epoch, both int64 [steps,
        tasks]. Column 0 has 1 for a ranking step, else 0. The other columns have numbers of rows.
    """
    shares, steps, seed = plan.shares(epoch), len(plan), plan.ranking.seed
    rows = plan.ranking.groups_per_step * plan.docs
    counts = np.zeros((steps, len(shares)), dtype=np.int64)
    if plan.sampling.composition == "mixed":
        counts[:, 0] = 1
        if len(shares) > 1:
            # Fractions of a row are carried over to the next step
            ends = np.floor(np.arange(1, steps + 1) * rows * (1 - shares[0]) / shares[0] + 1e-9).astype(np.int64)
            step_of = np.repeat(np.arange(steps), np.diff(ends, prepend=0))
            tasks = 1 + draw_tasks(shares[1:] / shares[1:].sum(), seed, epoch, len(step_of))
            np.add.at(counts, (step_of, tasks), 1)
    else:
        tasks = draw_tasks(shares, seed, epoch, steps)
        counts[np.arange(steps), tasks] = np.where(tasks == 0, 1, rows)
    return counts, np.cumsum(counts, axis=0) - counts


def draw_tasks(shares: np.ndarray, seed: int, epoch: int, count: int) -> np.ndarray:
    """Draw tasks independently by their shares, int64 [count]; the i-th draw depends on (seed, epoch, i) alone."""
    uniform = (mix(seed, epoch, 11, np.arange(count)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return np.minimum(np.searchsorted(np.cumsum(shares), uniform, side="right"), len(shares) - 1).astype(np.int64)


def _in_order(size: int, seed: int, epoch: int, task: int, start: int, count: int) -> np.ndarray:
    """Return the elements `start` to `start + count - 1` of endless shuffled passes over `range(size)`."""
    positions = np.arange(start, start + count)
    parts = [
        _shuffled(size, seed, epoch, task, int(turn))[positions[positions // size == turn] % size]
        for turn in np.unique(positions // size)
    ]
    return np.concatenate(parts) if parts else positions


@lru_cache(maxsize=32)
def _shuffled(size: int, seed: int, epoch: int, task: int, turn: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 1 + task, turn]).permutation(size)
