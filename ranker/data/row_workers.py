"""Parse rows in several processes, a few chunks ahead; the results are in the order of the rows."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from ranker.errors import DataError
from ranker.processes import available_cores

ALONE = 32  # number of items that this process computes before it starts other processes, which takes a second
MOST = 4  # one process writes the results of these processes, so more processes would only wait

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(compute: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None) -> Iterator[Result]:
    """Yield `compute(item)` for each item, in order; at most `workers + 2` items are in memory.

    Args:
        compute: A function that a new process can import.
        items: The items; only this process reads them.
        workers: Number of processes; 0: this process computes everything. None: the number of cores minus one, at most
            `MOST`; these processes start after the first `ALONE` items.

    Raises:
        DataError: A process has died, or `compute` has raised this error.
    """
    remaining = iter(items)
    if workers is None:
        workers = min(available_cores() - 1, MOST)
        yield from map(compute, islice(remaining, ALONE))
    first = next(remaining, None) if workers > 0 else None
    if first is None:
        yield from map(compute, remaining)
        return
    # "spawn", because a forked process inherits locks whose threads it does not have
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    running: deque[Future[Result]] = deque([pool.submit(compute, first)])
    try:
        for item in remaining:
            running.append(pool.submit(compute, item))
            if len(running) > workers + 1:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "rows: expected processes that parse rows, got one that ended; free memory, or guard a script of your own "
            "with if __name__ == '__main__', and start again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Exit when the process that reads the files ends, even if that process is killed."""
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
