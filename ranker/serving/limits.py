"""Bounds on what a server accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on requests; conf/serve.yaml explains them.

    Args:
        docs: Largest number of documents, or pairs, of a request.
        text_chars: Largest number of characters of a text.
        body_bytes: Largest body of a request.
        queue_pairs: Largest number of pairs of accepted requests that wait for their scores.
        connections: Largest number of open connections.
        request_seconds: Longest time to receive a request's body, and longest time to score it.
        stop_seconds: Longest time that a stopping server works on accepted requests.
    """

    docs: int = 1000
    text_chars: int = 100_000
    body_bytes: int = 10 * 2**20
    queue_pairs: int = 20_000
    connections: int = 1024
    request_seconds: float = 30
    stop_seconds: float = 30
