"""Time and memory of calls, for several benchmarks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Milliseconds:
    """Wall and CPU time of each of several calls, in milliseconds; the CPU time is that of all threads."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def of(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, add its times, and return its result."""
        started, spent = time.perf_counter(), time.process_time()
        result = call(*arguments)
        self.walls.append(1000 * (time.perf_counter() - started))
        self.cpus.append(1000 * (time.process_time() - spent))
        return result


def seconds_and_memory(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the seconds of a call, and on a GPU its peak memory in GB; on a CPU the memory is 0."""
    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0
