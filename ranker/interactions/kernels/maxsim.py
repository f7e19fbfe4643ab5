"""MaxSim of ragged texts in Triton, forward and backward, without writing similarities to the GPU's memory.

The forward pass stores the index of each maximum. In the backward pass, each Triton program computes the gradient of
some vectors, as a sum over pairs in a fixed order, so equal inputs give bit-identical gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranker.interactions.maxsim_pairs import Pairs

DOC_ROWS = 64  # doc vectors that a Triton program compares at a time
QUERY_ROWS = 64  # largest number of query vectors that a Triton program compares at a time
FORWARD = {"num_warps": 4, "num_stages": 3}
BACKWARD = {"num_warps": 4, "num_stages": 2}
SIZES = ["num_queries", "num_docs", "width"]  # arguments whose values Triton does not compile into a kernel


@triton.jit(do_not_specialize=SIZES)
def _forward(
    queries, docs, query_starts, doc_starts, query_of, doc_of, scores, places, num_queries, num_docs, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr, DOC_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, EVERY: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Compute the MaxSim of a pair. With EVERY, all pairs of queries and docs; neighbouring programs read one doc."""
    number = tl.program_id(0)
    if EVERY:
        query = (number % num_queries).to(tl.int64)
        doc = (number // num_queries).to(tl.int64)
        pair = query * num_docs + doc
    else:
        pair = number.to(tl.int64)
        query, doc = tl.load(query_of + pair), tl.load(doc_of + pair)
    first, end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
    doc_first, doc_end = tl.load(doc_starts + doc), tl.load(doc_starts + doc + 1)
    own_places = places + (doc * width + first if EVERY else pair * width)
    columns = tl.arange(0, COLUMNS)
    total = 0.0
    for part in range(0, (end - first).to(tl.int32), QUERY_ROWS):
        tokens = part + tl.arange(0, QUERY_ROWS)
        real = tokens < end - first
        query_mask = real[:, None]
        if COLUMNS != DIM:
            query_mask = query_mask & (columns < DIM)[None, :]
        query_rows = tl.load(queries + (first + tokens)[:, None] * DIM + columns[None, :], mask=query_mask, other=0.0)
        best = tl.full((QUERY_ROWS,), float("-inf"), tl.float32)
        place = tl.zeros((QUERY_ROWS,), tl.int32)
        for start in range(0, (doc_end - doc_first).to(tl.int32), DOC_ROWS):
            rows = start + tl.arange(0, DOC_ROWS)
            inside = rows < doc_end - doc_first
            doc_mask = inside[:, None]
            if COLUMNS != DIM:
                doc_mask = doc_mask & (columns < DIM)[None, :]
            near = (doc_first + rows)[:, None] * DIM + columns[None, :]
            doc_rows = tl.load(docs + near, mask=doc_mask, other=0.0).to(query_rows.dtype)
            similarities = tl.dot(query_rows, tl.trans(doc_rows), input_precision=PRECISION)
            similarities = tl.where(inside[None, :], similarities, float("-inf"))
            highest = tl.max(similarities, 1)
            if SAVE:
                # the index of the first of several equal maxima
                own = tl.min(tl.where(similarities == highest[:, None], rows[None, :], 2147483647), 1)
                place = tl.where(highest > best, own, place)
            best = tl.maximum(best, highest)
        total += tl.sum(tl.where(real, best, 0.0), 0)
        if SAVE:
            tl.store(own_places + tokens, place.to(places.dtype.element_ty), mask=real)
    tl.store(scores + pair, total)


@triton.jit(do_not_specialize=SIZES)
def _queries_backward(
    grads, docs, query_starts, doc_starts, doc_of, order, starts, places, out, num_docs, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of up to QUERY_ROWS vectors of a query over its pairs."""
    query = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    columns = tl.arange(0, COLUMNS)
    first, end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
    real = tokens < end - first
    mask = real[:, None] & (columns < DIM)[None, :]
    total = tl.zeros((QUERY_ROWS, COLUMNS), tl.float32)
    if EVERY:
        some, last = query * 0, num_docs
    else:
        some, last = tl.load(starts + query).to(tl.int32), tl.load(starts + query + 1).to(tl.int32)
    for number in range(some.to(tl.int32), last):
        if EVERY:
            doc = query * 0 + number
            pair = query * num_docs + doc
            own_places = places + doc * width + first
        else:
            pair = tl.load(order + number)
            doc = tl.load(doc_of + pair)
            own_places = places + pair * width
        rows = tl.load(doc_starts + doc) + tl.load(own_places + tokens, mask=real, other=0).to(tl.int64)
        vectors = tl.load(docs + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.load(grads + pair) * vectors
    tl.store(out + (first + tokens)[:, None] * DIM + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _docs_backward(
    grads, queries, query_starts, doc_starts, query_of, order, starts, places, out, num_queries, num_docs, width,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERY_ROWS: tl.constexpr, DOC_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of up to DOC_ROWS vectors of a doc over its pairs."""
    doc = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * DOC_ROWS + tl.arange(0, DOC_ROWS)
    columns = tl.arange(0, COLUMNS)
    first, end = tl.load(doc_starts + doc), tl.load(doc_starts + doc + 1)
    if tl.program_id(1) * DOC_ROWS < end - first:
        total = tl.zeros((DOC_ROWS, COLUMNS), tl.float32)
        if EVERY:
            some, last = doc * 0, num_queries
        else:
            some, last = tl.load(starts + doc).to(tl.int32), tl.load(starts + doc + 1).to(tl.int32)
        for number in range(some.to(tl.int32), last):
            if EVERY:
                query = doc * 0 + number
                pair = query * num_docs + doc
            else:
                pair = tl.load(order + number)
                query = tl.load(query_of + pair)
            query_first, query_end = tl.load(query_starts + query), tl.load(query_starts + query + 1)
            own_places = places + (doc * width + query_first if EVERY else pair * width)
            grad = tl.load(grads + pair)
            for start in range(0, (query_end - query_first).to(tl.int32), QUERY_ROWS):
                tokens = start + tl.arange(0, QUERY_ROWS)
                real = tokens < query_end - query_first
                place = tl.load(own_places + tokens, mask=real, other=-1).to(tl.int32)
                vectors = tl.load(
                    queries + (query_first + tokens)[:, None] * DIM + columns[None, :],
                    mask=real[:, None] & (columns < DIM)[None, :],
                    other=0.0,
                )
                chosen = tl.where(rows[:, None] == place[None, :], grad, 0.0).to(vectors.dtype)
                total += tl.dot(chosen, vectors, input_precision=PRECISION)
        mask = (rows < end - first)[:, None] & (columns < DIM)[None, :]
        tl.store(out + (first + rows)[:, None] * DIM + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


def _constants(pairs: Pairs, dim: int) -> dict[str, Any]:
    """Return the kernels' constants. The longest query, if unknown, is estimated by the mean, so nobody waits."""
    mean = -(-len(pairs.queries.values) // max(1, pairs.queries.num_texts))
    rows = min(QUERY_ROWS, max(16, triton.next_power_of_2(pairs.queries.longest or mean)))
    every = pairs.chosen is None
    return {"DIM": dim, "COLUMNS": max(16, triton.next_power_of_2(dim)), "QUERY_ROWS": rows, "EVERY": every}


def _scores(queries: Tensor, docs: Tensor, pairs: Pairs, places: Tensor | None) -> Tensor:
    """Return the scores, float32 [pairs], and fill `places` (see `_MaxSim`); None: the places are not stored."""
    if not len(queries):
        return torch.zeros(pairs.count, device=queries.device)
    scores = torch.empty(pairs.count, device=queries.device)
    if pairs.count:
        with torch.cuda.device_of(queries):  # Triton launches on the current device
            _forward[(pairs.count,)](
                queries, docs, pairs.queries.starts, pairs.docs.starts, *pairs.indices(), scores,
                scores if places is None else places, pairs.queries.num_texts, pairs.docs.num_texts,
                0 if places is None else places.shape[1], **_constants(pairs, queries.shape[1]), DOC_ROWS=DOC_ROWS,
                PRECISION=_precision(queries), SAVE=places is not None, **FORWARD,
            )  # fmt: skip
    return scores


class _MaxSim(torch.autograd.Function):
    """Store the index of each maximum in its doc: [pairs, longest query], or [docs, query vectors] for all pairs."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, docs: Tensor, pairs: Pairs) -> Tensor:
        shape = (pairs.docs.num_texts, len(queries)) if pairs.chosen is None else (pairs.count, pairs.queries.bound())
        places = torch.empty(
            shape, dtype=torch.int16 if pairs.docs.bound() < 2**15 else torch.int32, device=queries.device
        )
        scores = _scores(queries, docs, pairs, places)
        ctx.save_for_backward(queries, docs, places)
        ctx.pairs = pairs
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, docs, places = ctx.saved_tensors
        pairs, grads = ctx.pairs, grad.float().contiguous()
        constants, width = _constants(pairs, queries.shape[1]), places.shape[1]
        of_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        of_docs = torch.zeros_like(docs) if ctx.needs_input_grad[1] else None
        if not pairs.count or not len(queries):
            return of_queries, of_docs, None
        starts, (query_of, doc_of) = (pairs.queries.starts, pairs.docs.starts), pairs.indices()
        num_queries, num_docs = pairs.queries.num_texts, pairs.docs.num_texts
        with torch.cuda.device_of(queries):
            if of_queries is not None:
                parts = triton.cdiv(pairs.queries.bound(), constants["QUERY_ROWS"])
                _queries_backward[(num_queries, parts)](
                    grads, docs, *starts, doc_of, *pairs.by_query(), places, of_queries, num_docs, width, **constants,
                    **BACKWARD,
                )  # fmt: skip
            if of_docs is not None:
                _docs_backward[(num_docs, triton.cdiv(pairs.docs.bound(), DOC_ROWS))](
                    grads, queries, *starts, query_of, *pairs.by_doc(), places, of_docs, num_queries, num_docs, width,
                    **constants, DOC_ROWS=DOC_ROWS, PRECISION=_precision(queries), **BACKWARD,
                )  # fmt: skip
        return of_queries, of_docs, None


def _precision(values: Tensor) -> str:
    """Return the name of Triton's precision for products.

    A product in float32 is computed as three TF32 products, which are as exact as float32. Products of 16-bit values
    run on the tensor cores and are summed in float32.
    """
    return "tf32x3" if values.dtype == torch.float32 else "ieee"


def maxsim(queries: Tensor, docs: Tensor, pairs: Pairs) -> Tensor:
    """Return the MaxSim of each pair of a query and a doc, float32 [pairs].

    Without gradients, the host never waits for the device.

    Args:
        queries: Vectors of all queries, float32, bfloat16 or float16 [vectors, dim].
        docs: Vectors of all docs [vectors, dim]. If their type differs from that of the queries, they are converted to
            it block by block.
        pairs: The pairs, and the vectors of each text; each doc of a pair must have at least one vector.
    """
    queries, docs = queries.contiguous(), docs.contiguous()
    if torch.is_grad_enabled() and (queries.requires_grad or docs.requires_grad):
        result: Tensor = _MaxSim.apply(queries, docs, pairs)
        return result
    return _scores(queries, docs, pairs, None)
