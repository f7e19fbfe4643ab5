"""The queue of accepted requests, from which the model's thread takes batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ranker.serving.interface import Part, Tokenized


@dataclass(eq=False)
class Job:
    """A request whose pairs wait for the model or are in a batch.

    Args:
        pairs: The tokenized pairs.
        done: Set to None when all pairs have scores.
    """

    pairs: Tokenized
    done: asyncio.Future[None]
    scores: np.ndarray = field(init=False)
    taken: int = 0  # pairs that were put into batches
    scored: int = 0
    gone: bool = False  # nobody waits for the scores
    taken_at: float = 0.0  # when the first pair was put into a batch, on the clock of `time.perf_counter`

    def __post_init__(self) -> None:
        self.scores = np.empty(len(self.pairs.sizes), dtype=np.float32)


class PairQueue:
    """Requests in the order of their arrival; several threads may use the queue."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()  # guards `_jobs` and `_closed`
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        """Add a request."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let `take` return nothing when the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, max_tokens: int, only_full: bool = False) -> list[tuple[Job, Part]]:
        """Wait for pairs, and take pairs of the first requests up to the budget; a larger pair is a batch by itself.

        A request that must not be split is taken with all its pairs, or waits for the next batch. A request that filled
        a whole batch moves to the end of the queue, so that small requests need not wait for large ones.

        Args:
            max_tokens: Token budget.
            only_full: Do not wait, and take nothing if fewer tokens than the budget are waiting.

        Returns:
            The requests with their pairs in the batch; an empty list if the queue is closed and empty, or if
            `only_full` and there is no full batch.
        """
        with self._changed:
            if only_full:
                return self._batch(max_tokens) if self._is_full(max_tokens) else []
            while True:
                while self._jobs and self._jobs[0].gone:
                    self._jobs.popleft()
                if self._jobs or self._closed:
                    return self._batch(max_tokens)
                self._changed.wait()

    def _is_full(self, room: int) -> bool:
        """Whether the waiting pairs fill a batch."""
        for job in self._jobs:
            if not job.gone:
                room -= int(job.pairs.sizes[job.taken :].sum())
                if room <= 0:
                    return True
        return False

    def _batch(self, room: int) -> list[tuple[Job, Part]]:
        batch: list[tuple[Job, Part]] = []
        while self._jobs:
            job = self._jobs.popleft()
            if job.gone:
                continue
            ends = np.cumsum(job.pairs.sizes[job.taken :])
            count = int(np.searchsorted(ends, room, side="right"))
            if job.pairs.whole and count < len(ends):
                count = 0 if batch else len(ends)
            if count == 0 and batch:
                self._jobs.appendleft(job)
                break
            count = max(count, 1)
            job.taken_at = job.taken_at or time.perf_counter()
            batch.append((job, Part(job.pairs, job.taken, job.taken + count)))
            job.taken += count
            room -= int(ends[count - 1])
            if count < len(ends):
                (self._jobs.append if len(batch) == 1 else self._jobs.appendleft)(job)
                break
        return batch
