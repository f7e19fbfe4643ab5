"""Term weights in Triton: the product with the output matrix is pooled over the tokens of each row while computed.

A Triton program computes some words of one row. It keeps the logits of a block of tokens in registers and never writes
logits to the GPU's memory. The backward pass of the maxima sums in a fixed order, so equal inputs give bit-identical
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.types import TokenBatch

WARPS, STAGES = 8, 3  # launch settings of all kernels except `_matrix_backward`
INPUTS = {"WORDS": 64, "num_warps": WARPS, "num_stages": STAGES}
MATRIX = {"WORDS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 2}
FEWEST = 16  # least number of tokens or dims in a product; dim must be a multiple of FEWEST


@triton.jit
def _pool(
    inputs, matrix, bias, cu_seqlens, out, places, words, DIM: tl.constexpr, WORDS: tl.constexpr,
    TOKENS: tl.constexpr, DIMS: tl.constexpr, SUM: tl.constexpr, LOGARITHMS: tl.constexpr, BIAS: tl.constexpr,
    SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pool WORDS words of a row. SUM: sums of activated logits; else largest logits, with SAVE also their tokens."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    dims = tl.arange(0, DIMS)
    # rows past the end of the matrix repeat its last row, which changes no maximum
    matrix_rows = matrix + tl.minimum(word, words - 1).to(tl.int64)[:, None] * DIM + dims[None, :]
    offset = tl.zeros([WORDS], tl.float32)
    if BIAS:
        offset = tl.load(bias + tl.minimum(word, words - 1)).to(tl.float32)
    pooled = tl.full([WORDS], 0.0 if SUM else float("-inf"), tl.float32)
    place = tl.zeros([WORDS], tl.int32)
    for first in range(start, end, TOKENS):
        token = tl.minimum(first + tl.arange(0, TOKENS), end - 1)
        input_rows = inputs + token.to(tl.int64)[:, None] * DIM + dims[None, :]
        logits = tl.zeros([WORDS, TOKENS], tl.float32)
        for column in range(0, DIM, DIMS):
            some = tl.load(input_rows + column)
            logits = tl.dot(tl.load(matrix_rows + column), tl.trans(some), logits, input_precision=PRECISION)
        if SUM:
            values = tl.log(1.0 + tl.maximum(logits + offset[:, None], 0.0))
            if LOGARITHMS == 2:
                values = tl.log(1.0 + values)
            pooled += tl.sum(tl.where((first + tl.arange(0, TOKENS) < end)[None, :], values, 0.0), 1)
        else:
            highest = tl.max(logits, 1)
            if SAVE:
                # the index of the first of several equal maxima
                own = tl.min(tl.where(logits == highest[:, None], token[None, :], 2147483647), 1)
                place = tl.where(highest > pooled, own, place)
            pooled = tl.maximum(pooled, highest)
    if not SUM:
        pooled += offset
    tl.store(out + row * words + word, pooled, mask=word < words)
    if SAVE:
        tl.store(places + row * words + word, place, mask=word < words)


@triton.jit
def _inputs_backward(
    grads, places, matrix, cu_seqlens, out, words, DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of the gradient of TOKENS tokens of a row: sums over the words with maxima at a token."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(cu_seqlens + row + 1)
    token = tl.load(cu_seqlens + row) + tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.load(cu_seqlens + row) + tl.program_id(2) * TOKENS < end:
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, words, WORDS):
            word = first + tl.arange(0, WORDS)
            grad = tl.load(grads + row * words + word, mask=word < words, other=0.0)
            place = tl.load(places + row * words + word, mask=word < words, other=-1)
            vectors = tl.load(
                matrix + word.to(tl.int64)[:, None] * DIM + columns[None, :],
                mask=(word < words)[:, None] & (columns < DIM)[None, :],
                other=0.0,
            )
            chosen = tl.where(token[:, None] == place[None, :], grad[None, :], 0.0).to(vectors.dtype)
            total = tl.dot(chosen, vectors, total, input_precision=PRECISION)
        tl.store(
            out + token.to(tl.int64)[:, None] * DIM + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=(token < end)[:, None] & (columns < DIM)[None, :],
        )


@triton.jit(do_not_specialize=["rows"])
def _matrix_backward(
    grads, places, inputs, out, rows, words, DIM: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute COLUMNS columns of the gradient of WORDS words: sums over the rows, in the order of the rows."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([WORDS, COLUMNS], tl.float32)
    cells = word.to(tl.int64)
    for _ in range(rows):
        grad = tl.load(grads + cells, mask=word < words, other=0.0)
        taken = (word < words) & (grad != 0.0)
        place = tl.load(places + cells, mask=taken, other=0).to(tl.int64)
        vectors = tl.load(
            inputs + place[:, None] * DIM + columns[None, :], mask=taken[:, None] & (columns < DIM)[None, :], other=0.0
        )
        total += grad[:, None] * vectors.to(tl.float32)
        cells += words
    tl.store(
        out + word.to(tl.int64)[:, None] * DIM + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=(word < words)[:, None] & (columns < DIM)[None, :],
    )


def tile(mean_length: float, dim: int, item_bytes: int) -> dict[str, int]:
    """Return the sizes that a program of `_pool` handles at a time: numbers of words, tokens, and dims.

    Args:
        mean_length: Mean number of tokens of a row.
        dim: Size of the inputs, a multiple of `FEWEST`.
        item_bytes: Bytes of one value of the inputs.
    """
    tokens = 128 if mean_length > 96 else min(64, max(FEWEST, triton.next_power_of_2(int(mean_length))))
    dims = next(size for size in (128 // item_bytes, 64 // item_bytes, FEWEST) if dim % size == 0)
    return {"WORDS": 128 if tokens == 128 or item_bytes == 4 else 256, "TOKENS": tokens, "DIMS": dims}


def columns(dim: int, item_bytes: int) -> int:
    """Return the number of columns of an input's gradient that a program computes; for the arguments see `tile`."""
    return min(64 if item_bytes == 4 else 128, triton.next_power_of_2(dim))


def takes(inputs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernels support inputs [tokens, dim] with a product in `dtype`."""
    return inputs.is_cuda and dtype != torch.float64 and inputs.shape[1] % FEWEST == 0


def _precision(dtype: torch.dtype) -> str:
    """Return Triton's precision for products; a float32 product is three TF32 products, which are as exact."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _launch(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, save: bool, **constants: Any
) -> tuple[Tensor, Tensor]:
    rows, words = batch.num_rows, len(matrix)
    out = torch.empty(rows, words, dtype=torch.float32, device=inputs.device)
    places = torch.empty(out.shape if save else (0,), dtype=torch.int32, device=inputs.device)
    sizes = tile(batch.num_tokens / max(1, rows), inputs.shape[1], inputs.element_size())
    if rows:
        with torch.cuda.device_of(inputs):  # Triton launches on the current device
            _pool[(rows, triton.cdiv(words, sizes["WORDS"]))](
                inputs, matrix, matrix if bias is None else bias.contiguous(), batch.cu_seqlens, out, places, words,
                DIM=inputs.shape[1], BIAS=bias is not None, SAVE=save, PRECISION=_precision(inputs.dtype), **sizes,
                **constants, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return out, places


def largest(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the largest logit of each word over the tokens of each row.

    Args:
        inputs: float32, bfloat16 or float16 [tokens, dim]; products are summed in float32.
        matrix: [words, dim], of the same type as the inputs.
        bias: [words]; None: no bias.
        batch: The batch to which the inputs belong.
        save: Whether to return also the tokens of the largest logits.

    Returns:
        The logits, float32 [rows, words]. With `save`, also the index of the first token that has each logit, int32
        [rows, words]; otherwise None.
    """
    out, places = _launch(
        inputs.contiguous(), matrix.contiguous(), bias, batch, save, SUM=False, LOGARITHMS=1
    )  # fmt: skip
    return out, places if save else None


def sums(inputs: Tensor, matrix: Tensor, bias: Tensor | None, batch: TokenBatch, logarithms: int) -> Tensor:
    """Return the sum of each word's activated logits over the tokens of each row, float32 [rows, words].

    Args:
        inputs: See `largest`.
        matrix: See `largest`.
        bias: See `largest`.
        batch: See `largest`.
        logarithms: How often `log(1 + x)` is applied after relu, 1 or 2.
    """
    return _launch(
        inputs.contiguous(), matrix.contiguous(), bias, batch, False, SUM=True, LOGARITHMS=logarithms
    )[0]  # fmt: skip


def largest_backward(
    gradient: Tensor, places: Tensor, inputs: Tensor, matrix: Tensor, batch: TokenBatch
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `largest` with respect to inputs and matrix.

    Args:
        gradient: Gradient of the logits, float32 [rows, words].
        places: The tokens of the logits, as `largest` returned them.
        inputs: As in `largest`.
        matrix: As in `largest`.
        batch: The batch.

    Returns:
        The gradients of the inputs, [tokens, dim] in their type, and of the matrix, float32 [words, dim].
    """
    gradient, inputs, matrix = gradient.float().contiguous(), inputs.contiguous(), matrix.contiguous()
    words, dim = matrix.shape
    by_inputs = torch.empty_like(inputs)
    by_matrix = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
    tokens = tile(batch.num_tokens / max(1, batch.num_rows), dim, inputs.element_size())["TOKENS"]
    width = columns(dim, inputs.element_size())
    with torch.cuda.device_of(inputs):
        if batch.num_rows:
            _inputs_backward[(batch.num_rows, triton.cdiv(dim, width), triton.cdiv(batch.max_length, tokens))](
                gradient, places, matrix, batch.cu_seqlens, by_inputs, words, DIM=dim, TOKENS=tokens, COLUMNS=width,
                PRECISION=_precision(inputs.dtype), **INPUTS,
            )  # fmt: skip
        _matrix_backward[(triton.cdiv(words, MATRIX["WORDS"]), triton.cdiv(dim, MATRIX["COLUMNS"]))](
            gradient, places, inputs, by_matrix, batch.num_rows, words, DIM=dim, **MATRIX
        )  # fmt: skip
    return by_inputs, by_matrix
