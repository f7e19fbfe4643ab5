"""The processes of one run end together: a dead one must not leave the others waiting in a collective for ever."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time

PARENT = "RANKER_PARENT"  # environment variable: the id of the process that starts the other processes of a run
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe")


def global_rank() -> int:
    """This process's number under torchrun or SLURM; 0 where one process was started by hand."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_first_process() -> bool:
    """Whether this process keeps the run folder; Lightning numbers those that it starts on one machine."""
    return global_rank() == 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0


def watch_parent(seconds: float = 1.0, parent: int | None = None) -> None:
    """End this process when the one that started it has died; a collective on a GPU would wait for half an hour.

    Args:
        seconds: Time between two looks.
        parent: The id of the process that started this one; None: of the one that is its parent now. A parent that died
            before this call is no longer the parent, so this process ends at once.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(seconds)
        print("error: the first process of this run has died; ending this one", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def announce_parent() -> None:
    """Give the processes that this one starts its id, so that they know from their first moment whom to watch."""
    os.environ[PARENT] = str(os.getpid())


def watch_from_the_start() -> None:
    """Begin the watch in a process of a run other than the first one on its machine, before the imports that take long."""
    parent = os.environ.pop(PARENT, None)  # the processes that this one starts, such as data workers, are not its run's
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        watch_parent(parent=None if parent is None else int(parent))


def announce_dead_children() -> None:
    """Show what Lightning's launcher says when it finds a child dead and kills the others, within five seconds."""
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other side has gone."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or bool(
        isinstance(error, RuntimeError) and LOST.search(str(error))
    )
