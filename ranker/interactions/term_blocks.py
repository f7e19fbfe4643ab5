"""Compute the logits of all words block by block with torch's operations, pooled over the tokens of each row.

Only one block of the logits `[tokens, words]` is in memory at a time. On a CPU, the 2 MiB of a block in float32 fit
into the processor's cache. On other devices, a block has all words, so that fewer kernels are launched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ranker.interactions.pooling import sums_in_order

CPU_TOKENS, CPU_WORDS = 1024, 512  # size of a block; a block of one text may have more tokens
GPU_TOKENS, GPU_WORDS = 2048, 2**17
CPU_ENTRIES, GPU_ENTRIES = 2**14, 2**17  # number of terms whose gradients are propagated to the states at a time


def activated(logits: Tensor, activation: str) -> Tensor:
    """Return `log(1 + relu(x))`. `log1p_relu` applies `log(1 + x)` to it once more (OpenSearch, arXiv:2504.14839)."""
    values = logits.relu().log1p()
    return values.log1p() if activation == "log1p_relu" else values


def largest(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, lengths: list[int], save: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the largest logit of each word over the tokens of each row.

    Args:
        inputs: [tokens, dim]; products are computed in their dtype.
        matrix: [words, dim].
        bias: [words] or None.
        lengths: Number of tokens of each row, at least 1.
        save: Whether to return also the tokens of the largest logits.

    Returns:
        The logits, float32 or float64 [rows, words]. With `save`, also the index of the token that has each logit,
        int32 [rows, words]; otherwise None.
    """
    out = inputs.new_empty(len(lengths), len(matrix), dtype=full(inputs.dtype))
    tokens = torch.empty(out.shape, dtype=torch.int32, device=out.device) if save else None
    for rows, index in _row_blocks(lengths, inputs.device):
        some = inputs.index_select(0, index.flatten())
        for words in _word_blocks(matrix):
            logits = _logits(some, matrix[words], None if bias is None else bias[words]).view(*index.shape, -1)
            if tokens is None:
                out[rows, words] = logits.amax(1).to(out.dtype)
            else:
                highest, positions = logits.max(1)
                out[rows, words] = highest.to(out.dtype)
                tokens[rows, words] = index.gather(1, positions).int()
    return out, tokens


def largest_backward(gradient: Tensor, tokens: Tensor, inputs: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of inputs and matrix. Words whose logit has the gradient 0 are skipped.

    Args:
        gradient: Gradient of the largest logits [rows, words].
        tokens: As `largest` returned them.
        inputs: [tokens, dim].
        matrix: [words, dim].
    """
    by_inputs = torch.zeros_like(inputs, dtype=gradient.dtype)
    by_matrix = torch.zeros_like(matrix, dtype=gradient.dtype)
    entries = CPU_ENTRIES if inputs.device.type == "cpu" else GPU_ENTRIES
    for rows, words in zip(*(part.split(entries) for part in gradient.nonzero(as_tuple=True)), strict=True):
        values = gradient[rows, words].unsqueeze(1)
        of_tokens = tokens[rows, words].long()
        _add_rows(by_inputs, of_tokens, values * matrix.index_select(0, words))
        _add_rows(by_matrix, words, values * inputs.index_select(0, of_tokens))
    return by_inputs, by_matrix


def sums(inputs: Tensor, matrix: Tensor, bias: Tensor | None, lengths: list[int], activation: str) -> Tensor:
    """Return the sum of each word's activated logits over the tokens of each row, float32 or float64 [rows, words].

    Args:
        inputs: [tokens, dim]; products are computed in their dtype.
        matrix: [words, dim].
        bias: [words] or None.
        lengths: Number of tokens of each row, at least 1.
        activation: See `activated`.
    """
    out = inputs.new_empty(len(lengths), len(matrix), dtype=full(inputs.dtype))
    for rows, index in _row_blocks(lengths, inputs.device):
        some = inputs.index_select(0, index.flatten())
        for words in _word_blocks(matrix):
            logits = _logits(some, matrix[words], None if bias is None else bias[words]).to(out.dtype)
            values = activated(logits.view(*index.shape, -1), activation)
            out[rows, words] = values.masked_fill_(_filling(index), 0.0).sum(1)
    return out


def sums_backward(
    gradient: Tensor, inputs: Tensor, matrix: Tensor, bias: Tensor | None, lengths: list[int], activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the logits again, and return the gradients of inputs, matrix and bias.

    Args:
        gradient: Gradient of the sums [rows, words].
        inputs: See `sums`.
        matrix: See `sums`.
        bias: See `sums`.
        lengths: See `sums`.
        activation: See `activated`.
    """
    dtype = gradient.dtype
    # a GPU multiplies in half precision on its tensor cores
    product = inputs.dtype if inputs.is_cuda else dtype
    by_inputs, by_matrix = torch.zeros_like(inputs, dtype=dtype), torch.zeros_like(matrix, dtype=dtype)
    by_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
    for rows, index in _row_blocks(lengths, inputs.device):
        some = inputs.index_select(0, index.flatten())
        by_some = torch.zeros_like(some, dtype=dtype)
        for words in _word_blocks(matrix):
            logits = _logits(some, matrix[words], None if bias is None else bias[words]).to(dtype)
            by_logits = _slope(logits.view(*index.shape, -1), activation)
            by_logits.masked_fill_(_filling(index), 0.0).mul_(gradient[rows, words].unsqueeze(1))
            by_logits = by_logits.flatten(0, 1)
            if by_bias is not None:
                by_bias[words] += by_logits.sum(0)
            by_logits = by_logits.to(product)
            by_some += by_logits @ matrix[words].to(product)
            by_matrix[words] += by_logits.T @ some.to(product)
        # each token is in one block; a padding token gets the gradient 0
        real = ~_filling(index).flatten()
        by_inputs[index.flatten()[real]] = by_some[real]
    return by_inputs, by_matrix, by_bias


def full(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for any other type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_blocks(lengths: list[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield groups of rows of similar lengths. With padding, a group fits into one block, unless it is one row.

    Yields:
        Indices of rows, int64 [rows], and of their tokens, int64 [rows, longest]; padding repeats a row's last token.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    size = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    all_lengths = torch.tensor(lengths)
    starts = all_lengths.cumsum(0) - all_lengths
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        rows = torch.tensor(order[first : first + max(1, size // longest)])
        positions = torch.minimum(torch.arange(longest), all_lengths[rows].unsqueeze(1) - 1)
        yield rows.to(device), (starts[rows].unsqueeze(1) + positions).to(device)
        first += len(rows)


def _word_blocks(matrix: Tensor) -> Iterator[slice]:
    words, size = len(matrix), CPU_WORDS if matrix.device.type == "cpu" else GPU_WORDS
    return (slice(first, min(first + size, words)) for first in range(0, words, size))


def _logits(inputs: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits [tokens, words] in the dtype of the inputs."""
    weights = matrix.to(inputs.dtype).T
    return inputs @ weights if bias is None else torch.addmm(bias.to(inputs.dtype), inputs, weights)


def _filling(index: Tensor) -> Tensor:
    """Return True for padding tokens, which repeat the token before them, bool [rows, longest, 1]."""
    repeats = torch.zeros_like(index, dtype=torch.bool)
    repeats[:, 1:] = index[:, 1:] == index[:, :-1]
    return repeats.unsqueeze(2)


def _slope(logits: Tensor, activation: str) -> Tensor:
    """Return the derivative of `activated`."""
    positive = logits.relu()
    slope = (logits > 0) / (1 + positive)
    return slope / (1 + positive.log1p()) if activation == "log1p_relu" else slope


def _add_rows(out: Tensor, targets: Tensor, values: Tensor) -> None:
    """Add each row of `values` [entries, dim] to the row of `out` that `targets` [entries] names, in a fixed order."""
    if not out.is_cuda:
        out.index_add_(0, targets, values)
        return
    # on CUDA, index_add uses atomics, whose order of summation can differ between runs
    order = targets.argsort(stable=True)
    out += sums_in_order(values.index_select(0, order), targets.bincount(minlength=len(out))).to(out.dtype)
