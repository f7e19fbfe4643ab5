"""End all processes of a run together, so that no process waits in a collective for one that has died."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from typing import Any

PARENT = "RANKER_PARENT"  # environment variable: id of the process that started the other processes of a run
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe")


def global_rank() -> int:
    """Return the rank of this process under torchrun or SLURM; 0 if neither started it."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_first_process() -> bool:
    """Return whether this process writes the run folder. Lightning sets LOCAL_RANK in the processes that it starts."""
    return global_rank() == 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def watch_parent(seconds: float = 1.0, parent: int | None = None) -> None:
    """End this process when its parent dies. Otherwise a collective on a GPU would wait for half an hour.

    Args:
        seconds: Time between two checks.
        parent: Id of the process that started this one; None: the current parent. If that process has already died,
            this process has another parent and ends at the first check.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(seconds)
        print("error: the first process of this run has died; ending this one", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def announce_parent() -> None:
    """Store this process's id in the environment, so that the processes it starts can watch it."""
    os.environ[PARENT] = str(os.getpid())


def watch_from_the_start() -> None:
    """Watch the parent, in every process of a run except each machine's first one. Call this before slow imports."""
    parent = os.environ.pop(PARENT, None)  # processes that this one starts, such as data workers, must not see it
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        watch_parent(parent=None if parent is None else int(parent))


def announce_dead_children() -> None:
    """Show the message of Lightning's launcher when it detects a dead child (within 5 s) and kills the others."""
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)


def leave_without_peers(exit_code: int) -> None:
    """End this process at once if it is still in a process group. Call this after the error message is printed.

    A group that has lost a process may still have operations that wait for this process. Destroying the group, as a
    normal exit does, waits for these operations and can block for ever.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error comes from a collective in which another process has died."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or bool(
        isinstance(error, RuntimeError) and LOST.search(str(error))
    )
