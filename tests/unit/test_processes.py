"""A run's other processes end when the first one ends, even if it dies while they are still importing."""

import os
import signal
import subprocess
import sys

import pytest

# what Lightning's launcher does: the process that it starts has a number, and its folder and variables
FIRST = """
import os, subprocess, sys, time
from ranker.processes import announce_parent
announce_parent()
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "LOCAL_RANK": "1"})
time.sleep(60)
"""
# an entry script up to the imports that take long, which the last line stands for
SECOND = """
import time
print("started", flush=True)
time.sleep({before})
from ranker.cli import entry
entry.register()
print("registered", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("before", "killed_at"), [(0.0, "registered"), (2.0, "started")])
def test_a_second_process_that_still_imports_ends_with_the_first(before, killed_at):
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, SECOND.format(before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while process.stdout.readline().strip() != killed_at:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=20)  # until both have closed their end
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert err == "error: the first process of this run has died; ending this one\n"


def test_a_process_that_is_not_part_of_a_run_watches_nothing(monkeypatch):
    from threading import enumerate as threads

    from ranker.processes import PARENT, watch_from_the_start

    monkeypatch.setenv(PARENT, "1")  # of a run that started this process for another reason
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    watch_from_the_start()
    assert not [thread for thread in threads() if thread.name == "parent-watch"]
    assert PARENT not in os.environ


# Process 1 answers no operation after the first. Process 0 loses it while another operation waits.
PEERS = """
import sys, time
import torch
import torch.distributed as dist
from ranker.assembly.run import one_run
from ranker.cli.entry import user_errors
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 1:
    time.sleep(60)
with user_errors(), one_run():
    waiting = dist.all_reduce(torch.ones(1), async_op=True)
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
"""


def test_a_process_ends_at_once_when_it_has_lost_another_one(tmp_path):
    """Destroying the process group would wait for the operation; the error message would never be printed."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PEERS, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        _, err = both[0].communicate(timeout=45)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert both[0].returncode == 1
    assert err.startswith("error: another process of this run has ended, so this one can't go on")
    assert err.count("\n") == 1
