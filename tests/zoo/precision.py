"""Float64 throughout. transformers computes norms, some softmaxes and rotary tables in float32 even in a float64 model.

The order of a sum depends on the length of rows, on padding and on the processor's vector instructions. So sums in
float32 differ by 1e-7 between layouts of the same rows. For example, the softmax of LongT5's attention runs over a row
and its padding, and its backward pass sums in float32.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CASTS = (torch.Tensor.to, torch.Tensor.type)


class Float64Stays(TorchFunctionMode):
    """A context in which transformers' code casts no float64 tensor to float32; other code does as it says."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run a function of torch; a cast of float64 to float32 returns its input."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64 and _called_by_transformers():
            if func is torch.Tensor.float or (func in CASTS and torch.float32 in (*args[1:], kwargs.get("dtype"))):
                return args[0]
            if kwargs.get("dtype") is torch.float32:  # softmax(logits, dtype=torch.float32)
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _called_by_transformers() -> bool:
    """Whether the innermost caller outside of torch is a module of transformers."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "transformers"
