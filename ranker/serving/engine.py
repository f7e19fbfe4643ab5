"""Continuous batching: one thread runs the model over batches of the waiting pairs of all requests.

A request's pairs are tokenized as soon as it is accepted. Whenever the model is free, the next batch takes waiting
pairs up to the token budget: those of several requests, or a part of a large request. While a GPU computes a batch, the
thread prepares and launches the next one, if enough pairs are waiting to fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ranker.processes import available_cores
from ranker.serving.interface import Model, Part, ScoringFailed, Unavailable
from ranker.serving.metrics import Metrics
from ranker.serving.queue import Job, PairQueue

log = logging.getLogger(__name__)

MOST_RETRY_SECONDS = 60
FAILING_BATCHES = 3  # after this many consecutive batches without a score, the state is `failing`
RATE_SHARE = 0.2  # weight of the latest batch in the running mean of pairs per second


class Engine:
    """Accept requests, batch their pairs, and score them in one thread. Call all methods in the event loop's thread.

    Args:
        queue_pairs: Largest number of pairs that wait for scores; above it, requests are refused.
        metrics: Counters of batches and of the queue.
    """

    def __init__(self, queue_pairs: int, metrics: Metrics) -> None:
        self.queue_pairs, self.metrics = queue_pairs, metrics
        self.waiting_pairs = 0
        self.load_error: BaseException | None = None
        self._model: Model | None = None
        self._queue = PairQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._open_requests = 0
        self._failed_batches = 0
        self._rate = 0.0  # pairs per second, a running mean
        self._tokenizers = ThreadPoolExecutor(max(1, available_cores() - 1), thread_name_prefix="tokenize")

    def start(self, load: Callable[[], Model], on_failure: Callable[[], None]) -> None:
        """Load the model in the thread that will run it.

        Args:
            load: Returns the model.
            on_failure: Called in the event loop if `load` raises an error, which is then in `load_error`.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, args=(load, on_failure), name="model", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """`loading`, `ready`, `stopping`, or `failing`: the last batches got no scores, or the thread has ended."""
        if self._stopping or self._model is None:
            return "stopping" if self._stopping else "loading"
        return "ready" if not self._has_ended and self._failed_batches < FAILING_BATCHES else "failing"

    @property
    def _has_ended(self) -> bool:
        """Whether an unexpected error has ended the model's thread."""
        return self._thread is not None and not self._thread.is_alive()

    def check(self, pairs: int) -> None:
        """Raise an error if a request with this many pairs would be refused now.

        Raises:
            Unavailable: The model is loading, the server stops, or the queue is full.
        """
        reason = {"loading": "the model is still loading", "stopping": "the server is stopping"}.get(self.state)
        if reason is None and self._has_ended:
            reason = "the model's thread has ended after an error; start this server again"
        if reason is not None:
            raise Unavailable(f"{reason}; try again, or ask another server")
        if self.waiting_pairs and self.waiting_pairs + pairs > self.queue_pairs:
            seconds = self.waiting_pairs / self._rate if self._rate else 1
            raise Unavailable(
                f"the queue is full: {self.waiting_pairs} pairs are waiting, at most {self.queue_pairs} may; try again",
                is_full=True,
                retry_seconds=min(max(1, math.ceil(seconds)), MOST_RETRY_SECONDS),
            )

    async def score(self, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, int]:
        """Score a request's pairs. If the caller is cancelled, pairs that are not in a batch yet are dropped.

        Args:
            pairs: Pairs of a query and a doc, at least one.

        Returns:
            The scores, float32 [pairs], and the number of tokens of all pairs.

        Raises:
            Unavailable: See `check`.
            ScoringFailed: See `ScoringFailed`.
        """
        self.check(len(pairs))
        assert self._model is not None
        self._count(1, len(pairs))
        job: Job | None = None
        try:
            started = time.perf_counter()
            tokenized = await self._loop.run_in_executor(self._tokenizers, self._model.tokenize, pairs)
            job, queued = Job(tokenized, self._loop.create_future()), time.perf_counter()
            self._queue.put(job)
            await job.done
            self.metrics.stage("tokenize", queued - started)
            self.metrics.stage("queue", job.taken_at - queued)
            self.metrics.stage("score", time.perf_counter() - job.taken_at)
            return job.scores, int(tokenized.sizes.sum())
        finally:
            if job is not None:
                job.gone = True
            self._count(-1, -len(pairs))

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait at most `seconds` for the accepted ones; return whether all have ended."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    def close(self) -> None:
        """End the thread after its batch."""
        self._stopping = True
        self._queue.close()
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    def _count(self, requests: int, pairs: int) -> None:
        self._open_requests += requests
        self.waiting_pairs += pairs
        self.metrics.queue_pairs.set(self.waiting_pairs)
        if self._open_requests:
            self._idle.clear()
        else:
            self._idle.set()

    # in the model's thread ---------------------------------------------------------------------------------------

    def _work(self, load: Callable[[], Model], on_failure: Callable[[], None]) -> None:
        try:
            model = load()
        except BaseException as error:
            self.load_error = error
            self._in_loop(on_failure)
            return
        self._model = model
        self.metrics.batch_max_tokens.set(model.max_tokens)
        log.info("the model is loaded")
        ended = 0.0
        following: _Batch | None = None
        while batch := following or self._next_batch(model):
            following = self._next_batch(model, only_full=True) if model.computes_aside else None
            before = time.perf_counter()
            outcome = batch.outcomes()
            started, ended = max(ended, batch.started), time.perf_counter()
            self.metrics.thread("wait", ended - before)
            self._in_loop(self._deliver, batch.jobs, batch.parts, outcome, ended - started)

    def _next_batch(self, model: Model, only_full: bool = False) -> _Batch | None:
        """Launch the next batch; None: the queue is closed and empty, or there is no full batch."""
        before = time.perf_counter()
        jobs = self._queue.take(model.max_tokens, only_full)
        self.metrics.thread("idle", time.perf_counter() - before)
        if not jobs:
            return None
        before, cpu = time.perf_counter(), time.thread_time()
        batch = _Batch(model, jobs)
        self.metrics.thread("prepare", time.perf_counter() - before)
        self.metrics.thread("prepare_cpu", time.thread_time() - cpu)
        return batch

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # in the event loop's thread ----------------------------------------------------------------------------------

    def _deliver(
        self, jobs: list[Job], parts: list[Part], outcome: list[np.ndarray | Exception], seconds: float
    ) -> None:
        pairs = sum(part.end - part.start for part in parts)
        tokens = sum(int(part.pairs.sizes[part.start : part.end].sum()) for part in parts)
        self.metrics.batch(len(parts), pairs, tokens, seconds)
        is_failed = all(isinstance(result, Exception) for result in outcome)
        self._failed_batches = self._failed_batches + 1 if is_failed else 0
        latest = pairs / max(seconds, 1e-9)
        self._rate = latest if not self._rate else (1 - RATE_SHARE) * self._rate + RATE_SHARE * latest
        for job, part, result in zip(jobs, parts, outcome, strict=True):
            if job.done.done():
                continue
            if isinstance(result, Exception):
                job.gone = True
                job.done.set_exception(result)
                continue
            job.scores[part.start : part.end] = result
            job.scored += part.end - part.start
            if job.scored == len(job.scores):
                job.done.set_result(None)


class _Batch:
    """A batch that the model has begun to score.

    Args:
        model: The model.
        jobs: The requests with their pairs of the batch.
    """

    def __init__(self, model: Model, jobs: list[tuple[Job, Part]]) -> None:
        self.jobs, self.parts = [job for job, _ in jobs], [part for _, part in jobs]
        self.started = time.perf_counter()
        self._model = model
        self._wait: Callable[[], np.ndarray] | Exception = _launched(model, self.parts)

    def outcomes(self) -> list[np.ndarray | Exception]:
        """Wait for the batch; return each part's scores, or its error."""
        return _outcomes(self._model, self.parts, self._wait)


def _launched(model: Model, parts: list[Part]) -> Callable[[], np.ndarray] | Exception:
    try:
        return model.launch(parts)
    except Exception as error:
        return error


def _outcomes(
    model: Model, parts: list[Part], wait: Callable[[], np.ndarray] | Exception
) -> list[np.ndarray | Exception]:
    """Return each part's scores or error. After an error, each part is scored alone, so that the others succeed.

    Args:
        model: The model.
        parts: The parts of the batch.
        wait: What `model.launch` returned or raised.
    """
    try:
        if isinstance(wait, Exception):
            raise wait
        scores = wait()
    except Exception as error:
        if len(parts) > 1:
            return [outcome for part in parts for outcome in _outcomes(model, [part], _launched(model, [part]))]
        where = traceback.extract_tb(error.__traceback__)[-1]
        # not the error's message, which may quote a request's text
        log.error("scoring failed: %s in %s:%d", type(error).__name__, where.filename, where.lineno)
        return [ScoringFailed(f"the model failed on this request ({type(error).__name__})")]
    ends = np.cumsum([part.end - part.start for part in parts])
    return [
        part if np.isfinite(part).all() else ScoringFailed("the model gave a score that is not finite")
        for part in np.split(scores, ends[:-1])
    ]
