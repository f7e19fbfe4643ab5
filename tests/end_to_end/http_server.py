"""A server in a thread of the test process, which tests reach through a socket, and a model that tests can pause."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx

from ranker.serving.app import AppOptions
from ranker.serving.limits import Limits
from ranker.serving.model import RerankerModel
from ranker.serving.server import listen, serve


class HeldModel(RerankerModel):
    """The real model, except that it waits before each batch until `go` is set, and fails if a doc is `failing`."""

    def __init__(self, reranker, max_tokens=None, failing=None):
        super().__init__(reranker, max_tokens)
        self.go, self.busy, self.failing, self.batches = threading.Event(), threading.Event(), failing, []
        self.go.set()

    def tokenize(self, pairs):
        tokenized = super().tokenize(pairs)
        object.__setattr__(tokenized, "fails", any(doc == self.failing for _, doc in pairs))
        return tokenized

    def launch(self, parts):
        self.busy.set()
        assert self.go.wait(30)
        if any(part.pairs.fails for part in parts):
            raise RuntimeError(f"no memory for {self.failing}")
        self.batches.append([(part.start, part.end) for part in parts])
        return super().launch(parts)


@contextmanager
def running(load, token=None, sigmoid=False, log_requests=False, **limits):
    """Serve the model that `load` returns. Yield an HTTP client whose attribute `server` is the server."""
    listening = listen("127.0.0.1", 0)
    options = AppOptions(Limits(**limits), sigmoid, token, log_requests)
    started, servers, errors = threading.Event(), [], []

    def work():
        try:
            serve(load, listening, options, lambda server: (servers.append(server), started.set()))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.start()
    try:
        assert started.wait(30)
        with httpx.Client(base_url=url, timeout=60) as client:
            client.errors, client.thread, client.server = errors, thread, servers[0]
            yield client
    finally:
        servers[0].stop()
        thread.join(60)
        assert not thread.is_alive()


def wait_until(client, check, seconds=60):
    """Wait until `check(client)` is true, such as a condition on /health or /metrics."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check(client):
            return
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def is_ready(client):
    """Return whether the model is loaded."""
    return client.get("/health").status_code == 200


def metric(client, name, **headers):
    """Return the value of a metric."""
    lines = client.get("/metrics", headers=headers).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def free_port():
    """Return a port on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
