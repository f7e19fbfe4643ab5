r"""Term weights of texts: the logits of all words, pooled over the tokens of each text, block by block.

.. math:: w_j = \mathrm{pool}_{i} \log(1 + \mathrm{relu}(h_i \cdot W_j + b_j))

Memory has the logits `[tokens, words]` of only `BLOCK_TOKENS` tokens (or one longer text) and `BLOCK_WORDS` words at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ranker.interactions.pooling import sums_in_order
from ranker.types import TokenBatch

BLOCK_TOKENS, BLOCK_WORDS = 1024, 512  # logits at a time: 2 MiB in float32, which fit a processor's cache
ENTRIES = 2**14  # gradients of single terms that are propagated to the states at a time
POOLINGS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")  # before the logarithm; sentence-transformers' names


def activated(logits: Tensor, activation: str) -> Tensor:
    """Return `log(1 + relu(x))`, or for `log1p_relu` its logarithm once more (OpenSearch, arXiv:2504.14839)."""
    values = logits.relu().log1p()
    return values.log1p() if activation == "log1p_relu" else values


def term_weights(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, pooling: str, activation: str
) -> Tensor:
    """Return the weight of each word in each text, [rows, words]; float32, or float64 if the inputs are.

    Under autocast the product is computed in autocast's precision.

    Args:
        inputs: Inputs of the output layer, [tokens, dim].
        matrix: Output matrix, [words, dim].
        bias: [words]; None: there is none.
        batch: The batch that the inputs belong to; each row has at least one token.
        pooling: `max` (SPLADE-max, Formal et al., 2021, arXiv:2109.10086) or `sum` (SPLADE, arXiv:2107.05720).
        activation: One of `ACTIVATIONS`.
    """
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    lengths = batch.cu_seqlens.diff().tolist()
    with torch.autocast(device, enabled=False):
        if pooling == "max":
            largest: Any = LargestLogits.apply(inputs, matrix, bias, lengths, dtype)
            return activated(largest, activation)
        sums: Any = SummedTerms.apply(inputs, matrix, bias, lengths, dtype, activation)
        return sums  # type: ignore[no-any-return]


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_blocks(lengths: list[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of similar lengths, at most `BLOCK_TOKENS` tokens at a time, padding included.

    Yields:
        Rows, int64 [rows], and the index of each of their tokens, int64 [rows, longest]; padding repeats the last one.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    all_lengths = torch.tensor(lengths)
    starts = all_lengths.cumsum(0) - all_lengths
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        rows = torch.tensor(order[first : first + max(1, BLOCK_TOKENS // longest)])
        positions = torch.minimum(torch.arange(longest), all_lengths[rows].unsqueeze(1) - 1)
        yield rows.to(device), (starts[rows].unsqueeze(1) + positions).to(device)
        first += len(rows)


def _word_blocks(words: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK_WORDS, words)) for first in range(0, words, BLOCK_WORDS))


def _logits(inputs: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits [tokens, words] in the dtype of the inputs."""
    weights = matrix.to(inputs.dtype).T
    return inputs @ weights if bias is None else torch.addmm(bias.to(inputs.dtype), inputs, weights)


class LargestLogits(torch.autograd.Function):
    """The largest logit of each word over the tokens of each row, [rows, words].

    The forward pass stores which token had the largest logit. The gradient of a word goes to that token alone; after
    the activation most gradients are 0 and cost nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, matrix: Tensor, bias: Tensor | None, lengths: list[int], dtype: torch.dtype
    ) -> Tensor:
        """Return the largest logits; for the arguments see `term_weights`.

        Args:
            ctx: Saves the tokens for `backward`.
            inputs: [tokens, dim].
            matrix: [words, dim].
            bias: [words] or None.
            lengths: Tokens of each row.
            dtype: The type in which the product is computed.
        """
        differentiable = any(ctx.needs_input_grad)
        out = inputs.new_empty(len(lengths), len(matrix), dtype=_full(inputs.dtype))
        tokens = torch.empty(out.shape, dtype=torch.int32, device=out.device) if differentiable else None
        for rows, index in _row_blocks(lengths, inputs.device):
            some = inputs.index_select(0, index.flatten()).to(dtype)
            for words in _word_blocks(len(matrix)):
                part = None if bias is None else bias[words]
                logits = _logits(some, matrix[words], part).view(*index.shape, -1)
                if tokens is None:
                    out[rows, words] = logits.amax(1).to(out.dtype)
                else:
                    largest, positions = logits.max(1)
                    out[rows, words] = largest.to(out.dtype)
                    tokens[rows, words] = index.gather(1, positions).int()
        if tokens is not None:
            ctx.save_for_backward(inputs, matrix, tokens)
            ctx.has_bias = bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradients of inputs, matrix and bias."""
        inputs, matrix, tokens = ctx.saved_tensors
        by_inputs = torch.zeros_like(inputs, dtype=gradient.dtype)
        by_matrix = torch.zeros_like(matrix, dtype=gradient.dtype)
        for rows, words in zip(*(part.split(ENTRIES) for part in gradient.nonzero(as_tuple=True)), strict=True):
            values = gradient[rows, words].unsqueeze(1)
            of_tokens = tokens[rows, words].long()
            _add_rows(by_inputs, of_tokens, values * matrix.index_select(0, words))
            _add_rows(by_matrix, words, values * inputs.index_select(0, of_tokens))
        by_bias = gradient.sum(0).to(matrix.dtype) if ctx.has_bias else None
        return by_inputs.to(inputs.dtype), by_matrix.to(matrix.dtype), by_bias, None, None


class SummedTerms(torch.autograd.Function):
    """The sum of each word's activated logits over each row's tokens, [rows, words]; `backward` recomputes logits."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        lengths: list[int],
        dtype: torch.dtype,
        activation: str,
    ) -> Tensor:
        """Return the sums; for the arguments see `LargestLogits` and `term_weights`."""
        ctx.save_for_backward(inputs, matrix, bias)
        ctx.options = lengths, dtype, activation
        out = inputs.new_empty(len(lengths), len(matrix), dtype=_full(inputs.dtype))
        for rows, index in _row_blocks(lengths, inputs.device):
            some = inputs.index_select(0, index.flatten()).to(dtype)
            for words in _word_blocks(len(matrix)):
                logits = _logits(some, matrix[words], None if bias is None else bias[words]).to(out.dtype)
                values = activated(logits.view(*index.shape, -1), activation)
                out[rows, words] = values.masked_fill_(_filling(index), 0.0).sum(1)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradients of inputs, matrix and bias."""
        inputs, matrix, bias = ctx.saved_tensors
        lengths, dtype, activation = ctx.options
        by_inputs = torch.zeros_like(inputs, dtype=gradient.dtype)
        by_matrix = torch.zeros_like(matrix, dtype=gradient.dtype)
        by_bias = None if bias is None else torch.zeros_like(bias, dtype=gradient.dtype)
        for rows, index in _row_blocks(lengths, inputs.device):
            some = inputs.index_select(0, index.flatten())
            by_some = torch.zeros_like(some, dtype=gradient.dtype)
            for words in _word_blocks(len(matrix)):
                part = None if bias is None else bias[words]
                logits = _logits(some.to(dtype), matrix[words], part).to(gradient.dtype)
                by_logits = _slope(logits.view(*index.shape, -1), activation)
                by_logits.masked_fill_(_filling(index), 0.0).mul_(gradient[rows, words].unsqueeze(1))
                by_logits = by_logits.flatten(0, 1)
                by_some += by_logits @ matrix[words].to(gradient.dtype)
                by_matrix[words] += by_logits.T @ some.to(gradient.dtype)
                if by_bias is not None:
                    by_bias[words] += by_logits.sum(0)
            # each token is in one block, and padding has gradient 0
            real = ~_filling(index).flatten()
            by_inputs[index.flatten()[real]] = by_some[real]
        return by_inputs.to(inputs.dtype), by_matrix.to(matrix.dtype), by_bias, None, None, None


def _filling(index: Tensor) -> Tensor:
    """Return which tokens are padding, that is, repeat the one before, bool [rows, longest, 1]."""
    repeats = torch.zeros_like(index, dtype=torch.bool)
    repeats[:, 1:] = index[:, 1:] == index[:, :-1]
    return repeats.unsqueeze(2)


def _slope(logits: Tensor, activation: str) -> Tensor:
    """Return the derivative of `activated`."""
    positive = logits.relu()
    slope = (logits > 0) / (1 + positive)
    return slope / (1 + positive.log1p()) if activation == "log1p_relu" else slope


def _add_rows(out: Tensor, targets: Tensor, values: Tensor) -> None:
    """Add each row of `values` [entries, dim] to the row `targets` [entries] of `out`, in an order that is fixed."""
    if not out.is_cuda:
        out.index_add_(0, targets, values)
        return
    # on CUDA, index_add uses atomics, whose order of summation may change
    order = targets.argsort(stable=True)
    out += sums_in_order(values.index_select(0, order), targets.bincount(minlength=len(out))).to(out.dtype)
