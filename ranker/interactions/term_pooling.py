r"""Term weights of texts: the logits of all words, pooled over the tokens of each text.

.. math:: w_j = \mathrm{pool}_{i} \log(1 + \mathrm{relu}(h_i \cdot W_j + b_j))

The whole logits `[tokens, words]` are never in memory. On CUDA, a Triton kernel pools them while it computes them.
Elsewhere, and in float64, torch's operations compute and pool them block by block.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ranker.interactions import term_blocks
from ranker.interactions.term_blocks import activated
from ranker.types import TokenBatch

POOLINGS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")  # applied before the logarithm; the names are those of sentence-transformers
# if 1 / SPARSE of all terms have a gradient, the backward passes of kernel and `term_blocks` take the same time (H200)
SPARSE = 32


def term_weights(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, pooling: str, activation: str
) -> Tensor:
    """Return the weight of each word in each text, [rows, words], in float32, or in float64 for float64 inputs.

    Under autocast the product is computed in autocast's precision.

    Args:
        inputs: Inputs of the output layer, [tokens, dim].
        matrix: Output matrix, [words, dim].
        bias: [words]; None: no bias.
        batch: The batch to which the inputs belong; each row has at least one token.
        pooling: `max` (SPLADE-max, Formal et al., 2021, arXiv:2109.10086) or `sum` (SPLADE, arXiv:2107.05720).
        activation: One of `ACTIVATIONS`.
    """
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    with torch.autocast(device, enabled=False):
        if pooling == "max":
            largest: Any = LargestLogits.apply(inputs, matrix, bias, batch, dtype)
            return activated(largest, activation)
        sums: Any = SummedTerms.apply(inputs, matrix, bias, batch, dtype, activation)
        return sums  # type: ignore[no-any-return]


def has_kernel(inputs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernel supports inputs [tokens, dim] with a product in `dtype`."""
    if not inputs.is_cuda or find_spec("triton") is None:
        return False
    from ranker.interactions.kernels import term_pooling as kernels

    return kernels.takes(inputs, dtype)


def _lengths(batch: TokenBatch) -> list[int]:
    return batch.cu_seqlens.diff().tolist()  # type: ignore[no-any-return]


class LargestLogits(torch.autograd.Function):
    """The largest logit of each word over the tokens of each row, [rows, words].

    The forward pass stores which token has the largest logit. Only that token gets the gradient of the word.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, dtype: torch.dtype
    ) -> Tensor:
        """Return the largest logits; for the arguments see `term_weights`.

        Args:
            ctx: Saves the tokens for `backward`.
            inputs: [tokens, dim].
            matrix: [words, dim].
            bias: [words] or None.
            batch: The batch, whose rows are pooled.
            dtype: The type in which the product is computed.
        """
        save, kernel = any(ctx.needs_input_grad), has_kernel(inputs, dtype)
        if kernel:
            from ranker.interactions.kernels import term_pooling as kernels

            out, tokens = kernels.largest(inputs.to(dtype), matrix.to(dtype), bias, batch, save)
        else:
            out, tokens = term_blocks.largest(inputs.to(dtype), matrix, bias, _lengths(batch), save)
        if tokens is not None:
            ctx.save_for_backward(inputs, matrix, tokens)
            ctx.options = batch, dtype, kernel
            ctx.has_bias = bias is not None
        return out.to(term_blocks.full(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradients of inputs, matrix and bias."""
        inputs, matrix, tokens = ctx.saved_tensors
        batch, dtype, kernel = ctx.options
        # the operations of `term_blocks` visit only terms with a gradient; the kernel visits all
        if kernel and int(gradient.count_nonzero()) * SPARSE > gradient.numel():
            from ranker.interactions.kernels import term_pooling as kernels

            some = kernels.largest_backward(gradient, tokens, inputs.to(dtype), matrix.to(dtype), batch)
        else:
            some = term_blocks.largest_backward(gradient, tokens, inputs, matrix)
        by_bias = gradient.sum(0).to(matrix.dtype) if ctx.has_bias else None
        return some[0].to(inputs.dtype), some[1].to(matrix.dtype), by_bias, None, None


class SummedTerms(torch.autograd.Function):
    """Sum each word's activated logits over each row's tokens, [rows, words]. `backward` recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        batch: TokenBatch,
        dtype: torch.dtype,
        activation: str,
    ) -> Tensor:
        """Return the sums; for the arguments see `LargestLogits` and `term_weights`."""
        ctx.save_for_backward(inputs, matrix, bias)
        ctx.options = batch, dtype, activation
        if has_kernel(inputs, dtype):
            from ranker.interactions.kernels import term_pooling as kernels

            return kernels.sums(inputs.to(dtype), matrix.to(dtype), bias, batch, 1 + ACTIVATIONS.index(activation))
        sums = term_blocks.sums(inputs.to(dtype), matrix, bias, _lengths(batch), activation)
        return sums.to(term_blocks.full(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradients of inputs, matrix and bias."""
        inputs, matrix, bias = ctx.saved_tensors
        batch, dtype, activation = ctx.options
        some = term_blocks.sums_backward(gradient, inputs.to(dtype), matrix, bias, _lengths(batch), activation)
        by_inputs, by_matrix, by_bias = some
        return by_inputs.to(inputs.dtype), by_matrix.to(matrix.dtype), by_bias, None, None, None
