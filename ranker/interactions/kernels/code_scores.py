"""MaxSim in Triton for docs whose vectors are replaced by centroids: a table has each centroid's similarities.

A table of one byte per query token and centroid stays in the GPU's caches. So all docs of a collection are scored
without an inverted list (compare the centroid interaction of PLAID; Santhanam et al., 2022, arXiv:2205.09707).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 2048  # table cells that a Triton program reads at a time
DOCS = 8  # docs that a Triton program scores
LAUNCH = {"num_warps": 1}


@triton.jit(do_not_specialize=["num_docs", "num_centroids"])
def _code_scores(
    table, codes, starts, scores, num_docs, num_centroids,
    DOCS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Score DOCS docs for a query. Sums of integers are exact, so their order does not matter."""
    query = tl.program_id(1).to(tl.int64)
    own_table = table + query * num_centroids * TOKENS
    tokens = tl.arange(0, TOKENS)
    for number in range(0, DOCS):
        doc = tl.program_id(0).to(tl.int64) * DOCS + number
        if doc < num_docs:
            first, end = tl.load(starts + doc), tl.load(starts + doc + 1)
            best = tl.zeros((TOKENS,), tl.int32)
            for start in range(0, (end - first).to(tl.int32), ROWS):
                rows = first + start + tl.arange(0, ROWS)
                inside = rows < end
                code = tl.load(codes + rows, mask=inside, other=0)
                cells = code[:, None] * TOKENS + tokens[None, :]
                values = tl.load(own_table + cells, mask=inside[:, None], other=0)
                best = tl.maximum(best, tl.max(values.to(tl.int32), 0))
            tl.store(scores + query * num_docs + doc, tl.sum(best, 0))


def code_scores(table: Tensor, codes: Tensor, starts: Tensor) -> Tensor:
    """Return MaxSim from the table: for each query token the highest value in a doc, summed, int32 [queries, docs].

    Args:
        table: Similarity of each centroid with each query token, uint8 [queries, centroids, tokens]. The number of
            tokens is a power of two; a missing token has zeros.
        codes: Index of each vector's centroid, int32 [vectors].
        starts: Index of each doc's first vector, and at the end the number of all vectors, int64 [docs + 1].
    """
    (num_queries, num_centroids, tokens), num_docs = table.shape, len(starts) - 1
    scores = torch.zeros(num_queries, num_docs, dtype=torch.int32, device=table.device)
    if scores.numel():
        with torch.cuda.device_of(table):  # Triton launches on the current device
            _code_scores[(triton.cdiv(num_docs, DOCS), num_queries)](
                table, codes, starts, scores, num_docs, num_centroids, DOCS=DOCS, ROWS=max(16, CELLS // tokens),
                TOKENS=tokens, **LAUNCH,
            )  # fmt: skip
    return scores
