"""The server's counters for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = tuple(2**power for power in range(7, 18))


class Metrics:
    """Counters of one server; names begin with `ranker_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def labels(*names: str) -> dict[str, Any]:
            return {"labelnames": names, "registry": self.registry}

        self.requests = Counter("ranker_requests", "Answered requests.", **labels("route", "status"))
        self.request_seconds = Histogram(
            "ranker_request_seconds", "From the request's first line to its answer.", buckets=SECONDS, **labels("route")
        )
        self.queue_pairs = Gauge("ranker_queue_pairs", "Pairs of accepted requests without scores.", **labels())
        self._stages = Counter(
            "ranker_stage_seconds",
            "Time of answered requests: body (received and checked), tokenize, queue (until a batch has its first "
            "pair), score (until it has all scores), reply.",
            **labels("stage"),
        )
        self._thread = Counter(
            "ranker_thread_seconds",
            "Time of the model's thread: idle (no pairs), prepare (collate, copy and launch a batch), prepare_cpu (of "
            "this, CPU time), wait (for the scores of a launched batch).",
            **labels("state"),
        )
        self.batch_max_tokens = Gauge("ranker_batch_max_tokens", "Token budget of a batch.", **labels())
        self._pairs = Counter("ranker_pairs", "Scored pairs of a query and a doc.", **labels())
        self._tokens = Counter("ranker_tokens", "Tokens of the scored pairs.", **labels())
        self._batch_seconds = Histogram("ranker_batch_seconds", "Time of a batch.", buckets=SECONDS, **labels())
        self._batch_tokens = Histogram("ranker_batch_tokens", "Tokens of a batch.", buckets=TOKENS, **labels())
        self._batch_requests = Histogram("ranker_batch_requests", "Requests in a batch.", buckets=COUNTS, **labels())

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def stage(self, name: str, seconds: float) -> None:
        """Count the time of a request's stage."""
        self._stages.labels(name).inc(seconds)

    def thread(self, state: str, seconds: float) -> None:
        """Count time of the model's thread."""
        self._thread.labels(state).inc(max(seconds, 0.0))

    def batch(self, requests: int, pairs: int, tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._pairs.inc(pairs)
        self._tokens.inc(tokens)
        self._batch_seconds.observe(seconds)
        self._batch_tokens.observe(tokens)
        self._batch_requests.observe(requests)

    def text(self) -> bytes:
        """Return all values in Prometheus' text format."""
        return generate_latest(self.registry)
