"""Probes on all cores: a probe is too small for several threads, so that several processes train one each."""

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
from ranker.probing.online_code import Job, OnlineCoder, Outcome

WORTH_IT = 100_000  # pairs times probes from which on starting processes pays


def code_jobs(coder: OnlineCoder, jobs: Sequence[Job], workers: int | None = None) -> list[list[Outcome]]:
    """Code several jobs, on a CPU in several processes; returns each job's outcomes.

    Args:
        coder: Codes them; blocks that a process finishes are kept in the coder's store.
        jobs: The jobs.
        workers: Processes; None for one a core.
    """
    stacks = [(number, layers, seeds) for number, job in enumerate(jobs) for layers, seeds in coder.stacks(job)]
    work = sum(
        len(jobs[number].train) * len(layers) * len(seeds) * len(jobs[number].columns)
        for number, layers, seeds in stacks
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cores if workers is None else workers, len(stacks))
    on_cpu = all(job.inputs.device.type == "cpu" for job in jobs)
    if processes < 2 or not on_cpu or (workers is None and work < WORTH_IT):
        return [coder.code(job) for job in jobs]
    # a process that starts afresh: a fork would inherit the locks of threads that it does not have
    plain = replace(coder, store=BlockStore(None), progress=_nothing)
    found: dict[int, list[Outcome]] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start) as pool:
        # the largest first, so that no process is left with a long one at the end
        order = sorted(
            range(len(stacks)),
            key=lambda place: -len(jobs[stacks[place][0]].columns) * len(jobs[stacks[place][0]].train),
        )
        running: dict[Future[list[Outcome]], int] = {}
        try:
            for place in order:
                number, layers, seeds = stacks[place]
                running[pool.submit(_code, plain, coder.store.path, jobs[number], layers, seeds)] = place
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    place = running.pop(future)
                    found[place] = future.result()
                    coder.progress(len(found[place]) * (len(found[place][0].block_ends)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    for place, (number, _, _) in enumerate(stacks):
        outcomes[number] += found[place]
    return outcomes


def _nothing(_: int) -> None:
    """The process that started the others tells of the progress."""


def _start() -> None:
    """Use one thread, and end with the process that started this one, also when that is killed."""
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
