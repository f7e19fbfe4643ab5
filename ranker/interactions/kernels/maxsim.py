"""MaxSim of ragged texts in Triton, forward and backward, without writing similarities to the GPU's memory.

The forward pass stores the index of each maximum. In the backward pass, each program sums the gradient of its own
vectors over the pairs in a fixed order, so that equal inputs give bit-identical gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranker.interactions.maxsim_pairs import Pairs

DOC_ROWS = 64  # doc vectors that a program compares at a time
QUERY_ROWS = 64  # largest number of query vectors of a program
FORWARD = {"num_warps": 4, "num_stages": 3}
BACKWARD = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _forward(
    queries, docs, query_starts, doc_starts, query_of, doc_of, sums, places, parts, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr, DOC_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Sum the maximum similarities of up to QUERY_ROWS query vectors of a pair."""
    pair = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query, doc = tl.load(query_of + pair), tl.load(doc_of + pair)
    first, end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
    doc_first, doc_end = tl.load(doc_starts + doc), tl.load(doc_starts + doc + 1)
    columns = tl.arange(0, COLUMNS)
    tokens = part * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    real = tokens < end - first
    some = (first + tokens)[:, None] * DIM + columns[None, :]
    query_rows = tl.load(queries + some, mask=real[:, None] & (columns < DIM)[None, :], other=0.0)
    best = tl.full((QUERY_ROWS,), float("-inf"), tl.float32)
    place = tl.zeros((QUERY_ROWS,), tl.int32)
    for start in range(0, (doc_end - doc_first).to(tl.int32), DOC_ROWS):
        rows = start + tl.arange(0, DOC_ROWS)
        inside = rows < doc_end - doc_first
        near = (doc_first + rows)[:, None] * DIM + columns[None, :]
        doc_rows = tl.load(docs + near, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
        similarities = tl.dot(query_rows, tl.trans(doc_rows), input_precision=PRECISION)
        similarities = tl.where(inside[None, :], similarities, float("-inf"))
        highest = tl.max(similarities, 1)
        if SAVE:
            # the first of several equal maxima
            own = tl.min(tl.where(similarities == highest[:, None], rows[None, :], 2147483647), 1)
            place = tl.where(highest > best, own, place)
        best = tl.maximum(best, highest)
    tl.store(sums + pair * parts + part, tl.sum(tl.where(real, best, 0.0), 0))
    if SAVE:
        tl.store(places + pair * width + tokens, place.to(places.dtype.element_ty), mask=real)


@triton.jit
def _queries_backward(
    grads, docs, query_starts, doc_starts, doc_of, order, starts, places, out, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of up to QUERY_ROWS vectors of a query over its pairs."""
    query = tl.program_id(0)
    tokens = tl.program_id(1) * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    columns = tl.arange(0, COLUMNS)
    first, end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
    real = tokens < end - first
    mask = real[:, None] & (columns < DIM)[None, :]
    total = tl.zeros((QUERY_ROWS, COLUMNS), tl.float32)
    for number in range(tl.load(starts + query).to(tl.int32), tl.load(starts + query + 1).to(tl.int32)):
        pair = tl.load(order + number)
        rows = tl.load(doc_starts + tl.load(doc_of + pair)) + tl.load(
            places + pair * width + tokens, mask=real, other=0
        ).to(tl.int64)
        vectors = tl.load(docs + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.load(grads + pair) * vectors
    tl.store(out + (first + tokens)[:, None] * DIM + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _docs_backward(
    grads, queries, query_starts, doc_starts, query_of, order, starts, places, out, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr, DOC_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of up to DOC_ROWS vectors of a doc over its pairs."""
    doc = tl.program_id(0)
    rows = tl.program_id(1) * DOC_ROWS + tl.arange(0, DOC_ROWS)
    columns = tl.arange(0, COLUMNS)
    first, end = tl.load(doc_starts + doc), tl.load(doc_starts + doc + 1)
    if tl.program_id(1) * DOC_ROWS < end - first:
        total = tl.zeros((DOC_ROWS, COLUMNS), tl.float32)
        for number in range(tl.load(starts + doc).to(tl.int32), tl.load(starts + doc + 1).to(tl.int32)):
            pair = tl.load(order + number)
            query = tl.load(query_of + pair)
            query_first, query_end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
            grad = tl.load(grads + pair)
            for start in range(0, (query_end - query_first).to(tl.int32), QUERY_ROWS):
                tokens = start + tl.arange(0, QUERY_ROWS)
                real = tokens < query_end - query_first
                place = tl.load(places + pair * width + tokens, mask=real, other=-1).to(tl.int32)
                vectors = tl.load(
                    queries + (query_first + tokens)[:, None] * DIM + columns[None, :],
                    mask=real[:, None] & (columns < DIM)[None, :],
                    other=0.0,
                )
                chosen = tl.where(rows[:, None] == place[None, :], grad, 0.0).to(vectors.dtype)
                total += tl.dot(chosen, vectors, input_precision=PRECISION)
        mask = (rows < end - first)[:, None] & (columns < DIM)[None, :]
        tl.store(out + (first + rows)[:, None] * DIM + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


def _sizes(pairs: Pairs, dim: int) -> dict[str, Any]:
    return {
        "DIM": dim,
        "COLUMNS": max(16, triton.next_power_of_2(dim)),
        "QUERY_ROWS": min(QUERY_ROWS, max(16, triton.next_power_of_2(pairs.widest_query))),
    }


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, docs: Tensor, pairs: Pairs) -> Tensor:
        sizes = _sizes(pairs, queries.shape[1])
        parts = triton.cdiv(pairs.widest_query, sizes["QUERY_ROWS"])
        save = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        sums = torch.empty(pairs.count, parts, device=queries.device)
        place_type = torch.int16 if pairs.widest_doc < 2**15 else torch.int32
        places = torch.empty(pairs.count if save else 0, pairs.widest_query, dtype=place_type, device=queries.device)
        if pairs.count and parts:
            with torch.cuda.device_of(queries):  # Triton launches on the current device
                _forward[(pairs.count, parts)](
                    queries, docs, pairs.query_starts, pairs.doc_starts, pairs.query_of, pairs.doc_of, sums, places,
                    parts, pairs.widest_query, **sizes, DOC_ROWS=DOC_ROWS, PRECISION=_precision(queries), SAVE=save,
                    **FORWARD,
                )  # fmt: skip
        ctx.save_for_backward(queries, docs, places)
        ctx.pairs = pairs
        return sums.squeeze(1) if parts == 1 else sums.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, docs, places = ctx.saved_tensors
        pairs, sizes, grads = ctx.pairs, _sizes(ctx.pairs, queries.shape[1]), grad.float().contiguous()
        of_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        of_docs = torch.zeros_like(docs) if ctx.needs_input_grad[1] else None
        if not pairs.count or not pairs.widest_query:
            return of_queries, of_docs, None
        starts, width = (pairs.query_starts, pairs.doc_starts), pairs.widest_query
        with torch.cuda.device_of(queries):
            if of_queries is not None:
                parts = triton.cdiv(width, sizes["QUERY_ROWS"])
                _queries_backward[(len(starts[0]) - 1, parts)](
                    grads, docs, *starts, pairs.doc_of, *pairs.by_query(), places, of_queries, width, **sizes,
                    **BACKWARD,
                )  # fmt: skip
            if of_docs is not None:
                _docs_backward[(len(starts[1]) - 1, triton.cdiv(pairs.widest_doc, DOC_ROWS))](
                    grads, queries, *starts, pairs.query_of, *pairs.by_doc(), places, of_docs, width, **sizes,
                    DOC_ROWS=DOC_ROWS, PRECISION=_precision(queries), **BACKWARD,
                )  # fmt: skip
        return of_queries, of_docs, None


def _precision(values: Tensor) -> str:
    """Return Triton's precision for products: float32 as three TF32 products, which are as exact as float32."""
    return "tf32x3" if values.dtype == torch.float32 else "ieee"


def maxsim(queries: Tensor, docs: Tensor, pairs: Pairs) -> Tensor:
    """Return the MaxSim of each pair of a query and a doc, float32 [pairs].

    Args:
        queries: Vectors of all queries, float32, bfloat16 or float16 [vectors, dim].
        docs: Vectors of all docs, of the same type [vectors, dim].
        pairs: The pairs, and the vectors of each text; each doc of a pair must have a vector.
    """
    result: Tensor = _MaxSim.apply(queries.contiguous(), docs.contiguous(), pairs)
    return result
