"""Rows of tokens for the zoo's tests, laid out by the tokenizer itself, alone or together in one batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ranker.types import RankBatch, TokenBatch
from tests.zoo.texts import DOCS, LONG_DOC, QUERIES

PAIRS = [(QUERIES[i % len(QUERIES)], doc) for i, doc in enumerate([*DOCS, LONG_DOC])]
SAME_QUERY = [(QUERIES[0], doc) for doc in [*DOCS, LONG_DOC]]


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]] = PAIRS, longest: int = 160) -> list[dict[str, Tensor]]:
    """Return the tokenizer's inputs for each pair, [1, tokens] each; the doc is cut."""
    options = {"truncation": "only_second", "max_length": longest, "return_tensors": "pt"}
    return [dict(tokenizer(query, doc, **options)) for query, doc in pairs]


def token_batch(rows: Sequence[dict[str, Tensor]], row_ids: Sequence[int] | None = None) -> TokenBatch:
    """Return encoded rows as one ragged batch."""
    ids = [row["input_ids"][0] for row in rows]
    segments = [
        row["token_type_ids"][0] if "token_type_ids" in row else torch.zeros_like(row["input_ids"][0]) for row in rows
    ]
    lengths = torch.tensor([0, *map(len, ids)])
    return TokenBatch(
        torch.cat(ids),
        torch.cat(segments),
        lengths.cumsum(0).int(),
        int(lengths.max()),
        row_ids=None if row_ids is None else torch.tensor(row_ids),
    )


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, divided by the largest value of `theirs` if that is above 1."""
    return float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))


def rank_batch(rows: Sequence[dict[str, Tensor]]) -> RankBatch:
    """Return encoded pairs as the docs of one query group."""
    mask = torch.ones(1, len(rows), dtype=torch.bool)
    return RankBatch(torch.zeros(1, len(rows)), mask, torch.zeros(1, dtype=torch.int64), 1.0, pairs=token_batch(rows))
