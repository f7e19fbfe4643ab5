"""Train probes on all cores, with one single-threaded process per core, because a probe is too small for threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ranker.probing.blocks import BlockStore
from ranker.probing.coding_jobs import Job, Outcome
from ranker.probing.online_code import OnlineCoder
from ranker.processes import available_cores

MIN_WORK = 100_000  # training pairs times probes; with less work, the start of processes takes longer than they save


def code_jobs(coder: OnlineCoder, jobs: Sequence[Job], workers: int | None = None) -> list[list[Outcome]]:
    """Code several jobs. On a CPU, several processes share the work.

    Args:
        coder: The coder; all processes write finished blocks to the coder's store.
        jobs: The jobs.
        workers: Number of worker processes; None: one per core, but no process for little work.

    Returns:
        The outcomes of each job.
    """
    stacks = [(number, layers, seeds) for number, job in enumerate(jobs) for layers, seeds in coder.stacks(job)]
    work = sum(
        len(jobs[number].train) * len(layers) * len(seeds) * len(jobs[number].label_sets)
        for number, layers, seeds in stacks
    )
    cores = available_cores()
    processes = min(cores if workers is None else workers, len(stacks))
    on_cpu = all(job.inputs.device.type == "cpu" for job in jobs)
    if processes < 2 or not on_cpu or (workers is None and work < MIN_WORK):
        return [coder.code(job) for job in jobs]
    plain = replace(coder, store=BlockStore(None), progress=_ignore_progress)
    by_stack: dict[int, list[Outcome]] = {}
    # "spawn", because a forked process inherits locks, but not the threads that would release the locks
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start) as pool:
        # largest stacks come first, so that all processes finish at about the same time
        order = sorted(
            range(len(stacks)), key=lambda i: -len(jobs[stacks[i][0]].label_sets) * len(jobs[stacks[i][0]].train)
        )
        running: dict[Future[list[Outcome]], int] = {}
        try:
            for i in order:
                number, layers, seeds = stacks[i]
                running[pool.submit(_code, plain, coder.store.path, jobs[number], layers, seeds)] = i
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    i = running.pop(future)
                    by_stack[i] = future.result()
                    coder.progress(len(by_stack[i]) * len(by_stack[i][0].block_ends))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    for i, (number, _, _) in enumerate(stacks):
        outcomes[number] += by_stack[i]
    return outcomes


def _ignore_progress(_: int) -> None:
    """Do nothing: the main process reports progress, not the worker processes."""


def _start() -> None:
    """Use one thread, and exit when the main process ends, even if the main process is killed."""
    torch.set_num_threads(1)
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@cache
def _store(path: Path | None) -> BlockStore:
    return BlockStore(path)


def _code(coder: OnlineCoder, store: Path | None, job: Job, layers: list[int], seeds: list[int]) -> list[Outcome]:
    return replace(coder, store=_store(store)).code_stack(job, layers, seeds)
