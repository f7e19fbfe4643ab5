"""Align weights in memory."""

from __future__ import annotations

from torch import nn

CACHE_LINE = 64  # bytes; torch's own tensors begin at multiples of this


def align(module: nn.Module) -> None:
    """Copy weights on the CPU that do not begin at a cache line, so that equal weights give bit-identical results.

    Weights are memory-mapped from their file and may begin at any address. On some processors, the order of additions
    in a matrix product depends on the address.
    """
    for weight in [*module.parameters(), *module.buffers()]:
        if weight.device.type == "cpu" and weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()
