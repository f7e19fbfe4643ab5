"""Processes that tokenize, so that the interpreter lock of the server's process is free for the model and the sockets.

The tokenizer itself runs without the lock, but converting its results to Python objects needs the lock. For a request
of 100 docs this takes milliseconds, in which the model's thread can't launch kernels.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

from ranker.data.text_encoder import Encoded, TextEncoder
from ranker.data.word_cache import WordCache
from ranker.processes import available_cores

log = logging.getLogger(__name__)

Encode = Callable[[list[str]], Encoded]
MOST = 4  # maximum number of processes
CORES_EACH = 4  # cores per process: a process uses several cores for the texts of a request
FEW_CHARS = 2000  # shorter requests are tokenized by the caller


def default_count(on_gpu: bool) -> int:
    """Return the number of processes: none on a CPU, where the model needs the cores."""
    return min(MOST, available_cores() // CORES_EACH) if on_gpu else 0


def with_cache(encoder: TextEncoder) -> Encode:
    """Return an encoder that looks words up, if the tokenizer tokenizes each word by itself."""
    return WordCache(encoder) if encoder.by_word else encoder


class TokenizerProcesses:
    """A few processes with copies of some encoders; several threads may use them.

    Args:
        encoders: The encoders.
        count: Number of processes.
    """

    def __init__(self, encoders: Sequence[Encode], count: int) -> None:
        self._encoders = list(encoders)
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")  # a fork would copy the locks of other threads
        for number in range(count):
            ours, theirs = spawn.Pipe()
            # a daemon ends with this process; if this one is killed, the closed pipe ends it
            spawn.Process(target=_work, args=(theirs, self._encoders), name=f"tokenizer-{number}", daemon=True).start()
            theirs.close()
            self._connections.append(ours)
            self._free.put(ours)

    @property
    def encoders(self) -> list[Encode]:
        """For each encoder, a function that does the same in one of the processes."""
        return [partial(self._encode, number) for number in range(len(self._encoders))]

    def _encode(self, number: int, texts: list[str]) -> Encoded:
        if not self._connections or sum(map(len, texts)) < FEW_CHARS:
            return self._encoders[number](texts)
        connection = self._free.get()
        try:
            connection.send((number, texts))
            found: Encoded | Exception = connection.recv()
        except (OSError, EOFError):  # the process was ended from outside
            if not connection.closed:
                log.warning("a tokenizer process has ended; this process does its work from now on")
            connection.close()
            return self._encoders[number](texts)
        finally:
            self._free.put(connection)
        if isinstance(found, Exception):
            raise found
        return found


def _work(connection: Connection, encoders: list[Encode]) -> None:
    """Answer until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches all processes; the server ends this one
    while True:
        try:
            number, texts = connection.recv()
        except (EOFError, OSError):
            return
        try:
            found: Encoded | Exception = encoders[number](texts)
        except Exception as error:
            found = error
        connection.send(found)
