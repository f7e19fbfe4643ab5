"""The Triton kernels of one post-norm layer, for rows or for lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ranker.encoders.layer import kernel_average
from ranker.encoders.list_average import list_average

try:
    from ranker.encoders.kernels import (
        bias_gelu,
        list_attention,
        residual_norm,
        short_attention,
        short_attention_backward,
    )
except ImportError:  # no Triton
    bias_gelu = list_attention = residual_norm = short_attention = short_attention_backward = None  # type: ignore[assignment]


class Kernels(NamedTuple):
    """Forward and backward kernels of one layer. Only `average` supports autograd.

    Args:
        attend: See `ranker.encoders.kernels.short_attention.attend`.
        attend_backward: See `ranker.encoders.kernels.short_attention_backward.attend_backward`.
        bias_gelu: See `ranker.encoders.kernels.bias_gelu.bias_gelu`.
        bias_gelu_backward: See `bias_gelu_backward` there.
        residual_norm: See `ranker.encoders.kernels.residual_norm.residual_norm`.
        residual_norm_backward: See `residual_norm_backward` there.
        average: Attention of first tokens, see `ranker.encoders.layer.kernel_average`; in lists, see
            `ranker.encoders.list_average`.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    bias_gelu_backward: Callable[..., tuple[Tensor, Tensor]]
    residual_norm: Callable[..., Tensor]
    residual_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    average: Callable[..., Tensor]


def triton_kernels() -> Kernels:
    """Return the Triton kernels of this package."""
    return Kernels(
        short_attention.attend,
        short_attention_backward.attend_backward,
        bias_gelu.bias_gelu,
        bias_gelu.bias_gelu_backward,
        residual_norm.residual_norm,
        residual_norm.residual_norm_backward,
        kernel_average,
    )


def triton_list_kernels() -> Kernels:
    """Return the Triton kernels of this package for batches of lists."""
    return triton_kernels()._replace(
        attend=list_attention.attend_lists,
        attend_backward=list_attention.attend_lists_backward,
        average=list_average,
    )


def list_tensors(
    lists: Tensor, max_list: int, cu_seqlens: Tensor, token_rows: Tensor, list_size: int | None
) -> tuple[Tensor, ...]:
    """Return the rows of each list in the form that kernels read (`kernels.list_attention.list_tensors`)."""
    return list_attention.list_tensors(lists, max_list, cu_seqlens, token_rows, list_size)
