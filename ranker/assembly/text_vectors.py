"""Compute vectors of texts, and search docs in memory, with the bi-encoder of a `Reranker`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranker.assembly.reranker import Reranker
from ranker.data.collection import Candidates, Doc, MemoryDocs
from ranker.data.step_plan import fill
from ranker.errors import CheckpointError
from ranker.models.interface import is_bi_encoder
from ranker.retrieval.encode import Device, describe, encode_docs, encode_queries
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.index_type import IndexType
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.vector_engine import VectorEngine
from ranker.retrieval.vector_folder import claim
from ranker.retrieval.vector_store import VectorStore

SHARD_DOCS = 10_000


def encode(reranker: Reranker, texts: Sequence[str], are_queries: bool) -> np.ndarray:
    """Return a vector for each text, float32 [texts, dim].

    Args:
        reranker: A bi-encoder with one vector per text.
        texts: The texts.
        are_queries: True for queries, False for docs. Both have their own prompt, limit and perhaps encoder.

    Raises:
        CheckpointError: The model is not a bi-encoder, or has several vectors per text.
        DataError: A query's vector is not finite.
    """
    scorer = require_bi_encoder(reranker)
    if scorer.vectors != "one":
        raise CheckpointError(f"checkpoint: expected a model with one vector per text, got {type(scorer).__name__}")
    device, rows = _device(reranker), np.arange(len(texts))
    named = {str(row): text for row, text in enumerate(texts)}
    if are_queries:
        return encode_queries(scorer, reranker.texts.collator(named, {}), rows, device).values.numpy()
    collator = reranker.texts.collator({}, named)
    lengths = collator.doc.row_lengths(collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))
    order = np.argsort(-lengths, kind="stable")
    vectors = np.empty((len(texts), scorer.dim), dtype=np.float32)
    scorer.eval()
    for batch in fill(order, lengths[order], device.max_tokens):
        with torch.inference_mode(), device.autocast():
            encoded = scorer.encode_docs(collator.doc_batch(rows[batch]).to(device.device))
        vectors[batch] = encoded.values.float().cpu().numpy()
    return vectors


class DenseSearch:
    """Search over docs with stored vectors: exact scores of all docs, or of the docs that an index finds.

    Args:
        reranker: A bi-encoder: one vector per text, or one per token.
        docs: The docs.
        folder: Folder for the vectors; None: a folder in `cache_dir`, named by a hash of everything they depend on.
        cache_dir: Folder of all caches.
        index_type: Type of the index; None: all docs are scored.

    Raises:
        CheckpointError: The model is not a bi-encoder, or `folder` has vectors of another model or of other docs.
        DataError: Two docs have the same id, or a vector is not finite.
    """

    def __init__(
        self,
        reranker: Reranker,
        docs: Sequence[Doc],
        folder: Path | None = None,
        cache_dir: Path = Path(".cache"),
        index_type: IndexType | None = None,
    ) -> None:
        scorer = require_bi_encoder(reranker)
        self._reranker, device = reranker, _device(reranker)
        collator = reranker.texts.collator({}, {doc.doc_id: doc.full_text for doc in docs})
        description = describe(
            scorer,
            collator.docs,
            MemoryDocs(docs).fingerprint,
            collator.max_doc_tokens,
            "float32",
            reranker.precision,
            SHARD_DOCS,
        )
        folder = folder or cache_dir / "encoded" / description.digest
        claim(folder, description)
        encode_docs(scorer, collator, folder, description, device)
        store = VectorStore(folder)
        index = VectorIndex.over(store, index_type or Flat())
        self._engine = VectorEngine(scorer, collator, store, index, device)

    def search(self, queries: Mapping[str, str], depth: int) -> Candidates:
        """Return the best docs of each query in trec_eval's order.

        Args:
            queries: Id -> text.
            depth: Docs per query.
        """
        engine = copy.copy(self._engine)
        engine.collator = self._reranker.texts.collator(queries, {})
        return engine.search(list(queries), depth)


def require_bi_encoder(reranker: Reranker) -> Any:
    """Return the bi-encoder of a reranker, after moving it to the reranker's device.

    Raises:
        CheckpointError: The model is not a bi-encoder.
    """
    scorer = reranker.scorer
    if not is_bi_encoder(scorer):
        raise CheckpointError(f"checkpoint: expected a bi-encoder (dpr, colbert), got {type(scorer).__name__}")
    return scorer.to(reranker.devices.device)


def _device(reranker: Reranker) -> Device:
    devices = reranker.devices
    return Device(devices.device, devices.autocast, max_tokens=reranker.max_tokens)
