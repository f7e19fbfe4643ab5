"""Run the HTTP server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from ranker.errors import ConfigError
from ranker.serving.app import AppOptions, create_app
from ranker.serving.engine import Engine
from ranker.serving.interface import Model
from ranker.serving.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
CLOSE_SECONDS = 5  # time to send the last answers, and to end the last batch if the accepted requests took too long


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"host, port: expected an address to listen at, got {host}:{port}: {reason}; set host= or port="
        ) from error


def serve(
    load: Callable[[], Model],
    listening: socket.socket,
    options: AppOptions,
    started: Callable[[Server], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then answer the accepted requests, refuse new ones, and return.

    Args:
        load: Loads the model, in another thread; until then requests are answered with 503.
        listening: The socket, which is closed at the end.
        options: Options of the routes.
        started: Called with the server in the event loop's thread.

    Raises:
        Exception: What `load` raised.
    """
    asyncio.run(_serve(load, listening, options, started))


async def _serve(
    load: Callable[[], Model], listening: socket.socket, options: AppOptions, started: Callable[[Server], None]
) -> None:
    engine = Engine(options.limits.queue_pairs, Metrics())
    server = Server(engine, options)
    engine.start(load, on_failure=server.stop_now)
    started(server)
    try:
        await server.serve(sockets=[listening])
    finally:
        engine.close()
    if engine.load_error is not None:
        raise engine.load_error


class Server(uvicorn.Server):
    """A server that answers accepted requests and refuses new ones after a signal, and then ends.

    Args:
        engine: The engine that scores.
        options: Options of the routes.
    """

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(engine, options),
                lifespan="off",
                log_config=None,  # records go to this program's handlers
                log_level="warning",
                access_log=False,  # it would log query strings
                server_header=False,
                proxy_headers=False,
                limit_concurrency=options.limits.connections,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._engine, self._stop_seconds = engine, options.limits.stop_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    def stop(self) -> None:
        """Begin to end; any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._start_draining)

    def stop_now(self) -> None:
        """End without waiting for accepted requests."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002 - a signal handler
        """Handle SIGTERM and SIGINT; the second signal ends at once."""
        self._signals += 1
        if self._signals == 1:
            self.stop()
        else:
            self.should_exit = self.force_exit = True

    def _start_draining(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("stopping: %d pairs are waiting for their scores", self._engine.waiting_pairs)
        if not await self._engine.drain(self._stop_seconds):
            log.warning("stopping: some requests are not answered after %g seconds", self._stop_seconds)
        self.should_exit = True
