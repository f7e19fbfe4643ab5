"""Move a faiss index to all GPUs, as far as it fits their limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ranker.errors import ConfigError

log = logging.getLogger(__name__)

# limits on a GPU (faiss's wiki, "Faiss on the GPU"): maximum of vectors fetched and of lists probed; allowed sizes of a
# compressed vector in bytes
GPU_MAX = 2048
GPU_SUBVECTORS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)


def to_gpus(faiss: Any, index: Any, gpu: bool | None) -> tuple[Any, Callable[[], Any] | None]:
    """Move an index to all GPUs if `gpu` is true, or if it is None and faiss can do it.

    Returns:
        The index, and, if it moved, a function that copies it to main memory.

    Raises:
        ConfigError: `gpu` is true, and faiss has no GPU or the index exceeds a GPU's limits.
    """
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if gpu and not count:
        raise ConfigError(
            "index.gpu: expected a GPU that faiss sees, got none; install faiss-gpu-cu12, or set index.gpu=null"
        )
    if not count or gpu is False:
        return index, None
    excess = _gpu_excess(index)
    if excess and gpu:
        raise ConfigError(
            f"index.gpu: expected an index that fits a GPU, got {excess}; change that, or set index.gpu=null"
        )
    if excess:
        log.info("index: stays on the CPU, since it has %s", excess)
        return index, None
    options = faiss.GpuMultipleClonerOptions()
    # half precision for lookup tables only: for more than 48 subvectors they are too large in float32
    options.useFloat16 = hasattr(index, "pq")
    moved = faiss.index_cpu_to_all_gpus(index, co=options)
    return moved, lambda: faiss.index_gpu_to_cpu(moved)


def _gpu_excess(index: Any) -> str:
    """Return the option of an index that exceeds a GPU's limits; empty if none does."""
    if getattr(index, "nprobe", 0) > GPU_MAX:
        return f"more than {GPU_MAX} index.probes ({index.nprobe})"
    pq = getattr(index, "pq", None)
    if pq is not None and pq.nbits != 8:
        return f"fewer than 256 vectors ({pq.nbits} bits a code)"
    if pq is not None and pq.M not in GPU_SUBVECTORS:
        return f"{pq.M} index.subvectors, which are none of {', '.join(map(str, GPU_SUBVECTORS))}"
    return ""
