"""Score pairs of several requests in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ranker.assembly.reranker import Reranker
from ranker.data.collate import Collator
from ranker.data.memory_store import MemoryStore
from ranker.serving.interface import Part
from ranker.serving.tokenizing import TokenizerProcesses, default_count, with_cache

CPU_MAX_TOKENS, GPU_MAX_TOKENS = 2048, 65536


@dataclass(frozen=True)
class TokenizedPairs:
    """The tokenized pairs of a request.

    Args:
        collator: Holds the request's texts.
        query_rows: Row of each pair's query in the store of queries, int64 [pairs].
        doc_rows: Row of each pair's doc in the store of docs, int64 [pairs].
        sizes: Tokens that each pair adds to a batch, int64 [pairs].
    """

    collator: Collator
    query_rows: np.ndarray
    doc_rows: np.ndarray
    sizes: np.ndarray

    @property
    def whole(self) -> bool:
        """Whether the pairs of a query are a list that the model reads together."""
        return self.collator.whole_lists


class RerankerModel:
    """The model of a `Reranker`, without padding where its encoder needs none.

    Args:
        reranker: The loaded model.
        max_tokens: Token budget of a batch. None: 2,048 on a CPU, because larger batches are hardly faster there and
            every request in a batch waits for the end of the batch; otherwise 65,536.
        tokenizers: Number of processes that tokenize; None: `default_count`.
    """

    def __init__(self, reranker: Reranker, max_tokens: int | None = None, tokenizers: int | None = None) -> None:
        self.computes_aside = reranker.devices.device.type == "cuda"
        on_cpu = reranker.devices.device.type == "cpu"
        self.max_tokens = max_tokens or (CPU_MAX_TOKENS if on_cpu else GPU_MAX_TOKENS)
        reranker.scorer.to(reranker.devices.device)
        reranker.scorer.eval()
        count = default_count(self.computes_aside) if tokenizers is None else tokenizers
        self._reranker = reranker.tokenized_by(
            lambda encoders: TokenizerProcesses([with_cache(encoder) for encoder in encoders], count).encoders
        )

    def tokenize(self, pairs: Sequence[tuple[str, str]]) -> TokenizedPairs:
        """Tokenize a request's pairs; each text is tokenized once."""
        texts = (dict.fromkeys(column) for column in zip(*pairs, strict=True))
        rows = [{text: row for row, text in enumerate(column)} for column in texts]
        queries, docs = ({str(row): text for text, row in part.items()} for part in rows)
        collator = self._reranker.texts.collator(queries, docs)
        query_rows = np.array([rows[0][query] for query, _ in pairs], dtype=np.int64)
        doc_rows = np.array([rows[1][doc] for _, doc in pairs], dtype=np.int64)
        query_lengths = collator.query_lengths(query_rows)
        doc_lengths = collator.doc_lengths(doc_rows, query_lengths)
        if collator.reads == "pairs":
            sizes = query_lengths + doc_lengths + collator.pair.num_special
        else:  # a query of several pairs is encoded once
            is_first = np.diff(query_rows, prepend=-1) != 0
            sizes = collator.doc.row_lengths(doc_lengths) + collator.query.row_lengths(query_lengths) * is_first
        return TokenizedPairs(collator, query_rows, doc_rows, sizes)

    def launch(self, parts: Sequence[Part]) -> Callable[[], np.ndarray]:
        """Start to score the parts' pairs.

        Returns:
            A function that waits for the scores, one part after another, float32 [pairs], and returns them.
        """
        collator, query_rows, doc_rows, sizes = _joined(parts)
        inverse = np.arange(len(doc_rows))
        if not collator.whole_lists:  # a doc that a request has twice is scored once, so that both scores are the same
            keys = query_rows * len(collator.docs) + doc_rows
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            query_rows, doc_rows, sizes = query_rows[first], doc_rows[first], sizes[first]
        order = np.arange(len(doc_rows))
        if collator.whole_lists:
            order = np.argsort(query_rows, kind="stable")  # equal queries of different requests have different rows
            query_rows, grid = _by_query(query_rows[order], doc_rows[order])
        elif collator.reads == "pairs":
            order = np.argsort(-sizes, kind="stable")  # little padding for encoders that need it
            query_rows, grid = query_rows[order], doc_rows[order][:, None]
        else:
            query_rows, grid = _by_query(query_rows, doc_rows)
        labels = np.zeros(grid.shape, dtype=np.float32)
        batch = collator.collate(query_rows, grid, labels, np.arange(len(grid)), share=1.0)
        devices = self._reranker.devices
        if self.computes_aside:
            batch = batch.pin_memory()  # copies from other memory wait for the batch before
        with torch.inference_mode(), devices.autocast():
            values = self._reranker.scorer(batch.to(devices.device)).float()
            wait = _copied(values)

        def scores() -> np.ndarray:
            found = np.empty(len(order), dtype=np.float32)
            found[order] = wait()[grid >= 0]
            return found[inverse]

        return scores


def _copied(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start to copy a tensor to the CPU; return a function that waits for the copy."""
    if not values.is_cuda:
        return values.cpu().numpy
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> np.ndarray:
        event.synchronize()
        return copy.numpy()

    return wait


def _joined(parts: Sequence[Part]) -> tuple[Collator, np.ndarray, np.ndarray, np.ndarray]:
    """Return a collator over all parts' texts, and the query rows, doc rows and sizes of their pairs, [pairs] each."""
    requests: list[TokenizedPairs] = [part.pairs for part in parts]  # type: ignore[misc]
    collator = requests[0].collator
    if len(parts) > 1:
        collator = replace(
            collator,
            queries=MemoryStore.joined([request.collator.queries for request in requests]),
            docs=MemoryStore.joined([request.collator.docs for request in requests]),
        )
    starts = np.cumsum([[0, 0]] + [[len(part.collator.queries), len(part.collator.docs)] for part in requests], axis=0)
    columns = [
        (request.query_rows[cut] + start[0], request.doc_rows[cut] + start[1], request.sizes[cut])
        for request, part, start in zip(requests, parts, starts, strict=False)
        for cut in [slice(part.start, part.end)]
    ]
    query_rows, doc_rows, sizes = (np.concatenate(column) for column in zip(*columns, strict=True))
    return collator, query_rows, doc_rows, sizes


def _by_query(query_rows: np.ndarray, doc_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group consecutive pairs of a query: query rows [groups], and doc rows [groups, docs] with -1 for no doc."""
    is_first = np.diff(query_rows, prepend=-1) != 0
    starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    column = np.arange(len(query_rows)) - starts[group]
    grid = np.full((len(starts), int(column.max()) + 1), -1, dtype=np.int64)
    grid[group, column] = doc_rows
    return query_rows[starts], grid
