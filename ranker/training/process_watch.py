"""The processes of one run end together: a dead one must not leave the others waiting in a collective for ever."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time

LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe")


def watch_parent(seconds: float = 1.0) -> None:
    """End this process when the one that started it has died; a collective on a GPU would wait for half an hour."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        print("error: the first process of this run has died; ending this one", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def announce_dead_children() -> None:
    """Show what Lightning's launcher says when it finds a child dead and kills the others, within five seconds."""
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other side has gone."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or bool(
        isinstance(error, RuntimeError) and LOST.search(str(error))
    )
