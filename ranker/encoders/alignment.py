"""Where weights begin in memory."""

from __future__ import annotations

from torch import nn

CACHE_LINE = 64  # bytes; torch's own tensors begin at a multiple of it


def align(module: nn.Module) -> None:
    """Copy weights on the CPU that start inside of a cache line, so that the same weights give the same bits.

    Weights of a file are read in place, wherever they begin in it. Matrix products of some processors add up in an
    order that depends on the address.
    """
    for weight in [*module.parameters(), *module.buffers()]:
        if weight.device.type == "cpu" and weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()
