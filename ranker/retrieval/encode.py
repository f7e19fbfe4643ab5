"""Encode a collection's docs into a folder of vectors, on any number of devices, and queries into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from scipy import sparse

from ranker.data.collate import Collator
from ranker.data.ragged import ranges
from ranker.data.step_plan import fill
from ranker.data.text_encoder import tokenizer_fingerprint
from ranker.data.token_store import TokenStore
from ranker.errors import DataError
from ranker.files.folders import write_folder
from ranker.interactions.maxsim import TextVectors
from ranker.models.interface import BiEncoder, Scorer, is_bi_encoder, scoring_options
from ranker.retrieval.impact_store import write_impacts
from ranker.retrieval.vector_folder import LOG_SECONDS, Description, shard_folder
from ranker.retrieval.vector_store import ShardWriter
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

DTYPES = ("float32", "float16")
# configuration keys that do not influence the hidden states, because they describe only the stored file or training
NOT_STATES = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")


def weights_hash(module: Any) -> Any:
    """Return a running hash (hashlib) of a module's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest


def scorer_hash(scorer: Scorer) -> str:
    """Return a hash of what decides vectors and scores of texts: weights, architecture, tokenizer, settings."""
    digest = weights_hash(scorer)
    doc_encoder = scorer.doc_encoder if is_bi_encoder(scorer) else None
    for encoder in (scorer.encoder, doc_encoder or scorer.encoder):
        options = {key: value for key, value in encoder.config.to_dict().items() if key not in NOT_STATES}
        # `quantize_aware` rounds the weights in each forward pass, so it changes the states
        options["quantize_aware"] = encoder.execution.quantize_aware
        digest.update(json.dumps(options, sort_keys=True, default=str).encode())
    digest.update(tokenizer_fingerprint(scorer.encoder.tokenizer).encode())
    own = getattr(scorer, "settings", None)
    settings = {"pooling": getattr(scorer, "pooling", None)} if own is None else own()
    settings |= scoring_options(scorer)
    prompt = {key: getattr(scorer, key, None) for key in ("prompt", "words")}
    settings |= {key: value for key, value in prompt.items() if value is not None}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()


def describe(
    scorer: BiEncoder,
    docs: TokenStore,
    fingerprint: str,
    max_doc_tokens: int,
    dtype: str,
    precision: str,
    shard_docs: int,
) -> Description:
    """Return the description of the vectors that this scorer gives for these docs; for the arguments see `Description`.

    Raises:
        DataError: An unknown `dtype`.
    """
    if dtype not in DTYPES:
        raise DataError(f"dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
    return Description(
        scorer_hash(scorer),
        fingerprint,
        len(docs),
        scorer.similarity,
        scorer.dim,
        scorer.vectors == "tokens",
        dtype,
        precision,
        max_doc_tokens,
        shard_docs,
    )


@dataclass(frozen=True)
class Device:
    """The device of this process, and which shards it encodes.

    Args:
        device: Where the forward passes run.
        autocast: Returns the context that sets the precision of the forward passes.
        rank: Number of this process; it encodes the shards `rank`, `rank + world`, ...
        world: Number of processes.
        max_tokens: Maximum number of tokens in a batch.
    """

    device: str | torch.device = "cpu"
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    rank: int = 0
    world: int = 1
    max_tokens: int = 16384


def encode_docs(scorer: BiEncoder, collator: Collator, folder: Path, description: Description, device: Device) -> int:
    """Encode this process's shards, except those that exist already; memory does not grow with the collection.

    The bytes of a shard depend on its docs only, not on the process that encodes it or on existing shards. A shard
    appears complete or not at all.

    Args:
        scorer: The bi-encoder, on the device.
        collator: Holds the docs' token store.
        folder: Folder of the vectors; call `claim` on it first.
        description: What the vectors are computed from.
        device: Device and share of this process.

    Returns:
        Number of docs that this call encoded.

    Raises:
        DataError: A doc's vector is not finite.
    """
    scorer.eval()
    done, started, logged = 0, time.perf_counter(), time.perf_counter()
    for shard in range(device.rank, description.num_shards, device.world):
        path = shard_folder(folder, shard)
        with FileLock(folder / f".{path.name}.lock"):  # against another run over the same folder
            if path.is_dir():
                continue
            first = shard * description.shard_docs
            rows = np.arange(first, min(first + description.shard_docs, description.num_docs))
            encode_shard = _encode_impacts if scorer.vectors == "terms" else _encode_shard
            with write_folder(path) as unfinished:
                encode_shard(scorer, collator, rows, unfinished, description, device)
        done += len(rows)
        if time.perf_counter() - logged > LOG_SECONDS:
            logged = time.perf_counter()
            rate = done / (logged - started)
            log.info("encoding: shard %d of %d, %.0f docs/s", shard + 1, description.num_shards, rate)
    return done


def _encode_shard(
    scorer: BiEncoder, collator: Collator, rows: np.ndarray, folder: Path, description: Description, device: Device
) -> None:
    """Encode the docs of one shard, longest first, and write its files."""
    no_query = np.zeros(len(rows), dtype=np.int64)
    lengths = collator.doc_sizes(collator.doc_lengths(rows, no_query), no_query)
    order = np.argsort(-lengths, kind="stable")
    batches = fill(order, lengths[order], device.max_tokens)
    counts = np.ones(len(rows), dtype=np.int32)
    if description.several:
        for batch in batches:
            token_batch = collator.doc_batch(rows[batch]).to(device.device)
            counts[batch] = scorer.doc_vector_counts(token_batch).cpu().numpy()
    ends = np.cumsum(counts, dtype=np.int64)
    ids = collator.docs.ids()[rows]
    shard = ShardWriter(folder, description, int(rows[0]), ids, counts)
    for batch in batches:
        with np.errstate(over="ignore"):  # infinity is refused below
            values = _doc_vectors(scorer, collator.doc_batch(rows[batch]), device).astype(description.dtype)
        _check_finite(values, ids[np.repeat(batch, counts[batch])], description.dtype)
        shard.vectors[ranges(ends[batch] - counts[batch], counts[batch])] = values
    shard.finish()


def _encode_impacts(
    scorer: BiEncoder, collator: Collator, rows: np.ndarray, folder: Path, description: Description, device: Device
) -> None:
    """Encode the docs of one shard to sparse vectors, longest first, and write its files."""
    lengths = collator.doc.row_lengths(collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))
    order, ids = np.argsort(-lengths, kind="stable"), collator.docs.ids()[rows]
    parts = [sparse.csr_matrix((0, description.dim), dtype=np.float32)]
    for batch in fill(order, lengths[order], device.max_tokens):
        terms = doc_terms(scorer, collator.doc_batch(rows[batch]), device)
        with np.errstate(over="ignore"):  # infinity is refused below
            values = terms.data.astype(description.dtype)
        _check_finite(values[:, None], np.repeat(ids[batch], np.diff(terms.indptr)), description.dtype)
        terms.data = values.astype(np.float32)
        terms.eliminate_zeros()  # float16 has no weights below 6e-8
        parts.append(terms)
    in_order = sparse.vstack(parts, format="csr")[np.argsort(order)]
    in_order.sort_indices()
    write_impacts(folder, description, int(rows[0]), ids, in_order)


def doc_terms(scorer: BiEncoder, batch: TokenBatch, device: Device) -> Any:
    """Return the term weights of a batch of docs, a scipy CSR matrix float32 [docs, words].

    Weights of 0 do not leave the device.

    Args:
        scorer: A sparse ranker, on the device.
        batch: The docs.
        device: Device and precision.
    """
    with torch.inference_mode(), device.autocast():
        weights = scorer.encode_docs(batch.to(device.device)).values
    rows, words = weights.nonzero(as_tuple=True)
    values = weights[rows, words].float().cpu().numpy()
    ends = (weights != 0).sum(1).cumsum(0).cpu().numpy()
    return sparse.csr_matrix((values, words.int().cpu().numpy(), np.append(0, ends)), weights.shape)


def _check_finite(values: np.ndarray, ids: np.ndarray, dtype: str) -> None:
    """Refuse vectors [vectors, dim] that are not finite.

    Args:
        values: The vectors.
        ids: The id of each vector's doc [vectors].
        dtype: The data type of the stored vectors; used only in the error message.

    Raises:
        DataError: A vector is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise DataError(
            f"encoding: expected finite vectors, got NaN or infinity for doc {ids[bad[0]].decode()!r} "
            f"in {dtype}; look at the checkpoint, or set encode.dtype=float32"
        )


def _doc_vectors(scorer: BiEncoder, batch: TokenBatch, device: Device) -> np.ndarray:
    """Return the vectors of a batch of docs, float32 [vectors, dim]."""
    with torch.inference_mode(), device.autocast():
        return scorer.encode_docs(batch.to(device.device)).values.float().cpu().numpy()


def encode_queries(scorer: BiEncoder, collator: Collator, rows: np.ndarray, device: Device) -> TextVectors:
    """Encode queries.

    Args:
        scorer: The bi-encoder, on the device.
        collator: Holds the queries' token store.
        rows: Rows of the queries in the store, int64 [queries].
        device: Where to compute.

    Returns:
        Their vectors in the order of `rows`, float32, in main memory.

    Raises:
        DataError: A query's vector is not finite.
    """
    if scorer.training:  # `eval` walks through all modules: for a single query a fifth of the encoding time
        scorer.eval()
    lengths = collator.query.row_lengths(collator.query_lengths(rows))
    parts = []
    for batch in fill(np.arange(len(rows)), lengths, device.max_tokens):
        with torch.inference_mode(), device.autocast():
            vectors = scorer.encode_queries(collator.query_batch(rows[batch]).to(device.device))
            parts.append(vectors.to("cpu", non_blocking=False))
    if not parts:
        no_counts = torch.zeros(0, dtype=torch.int64) if scorer.vectors == "tokens" else None
        return TextVectors(torch.zeros(0, scorer.dim), no_counts)
    counts = None if parts[0].counts is None else torch.cat([part.counts for part in parts if part.counts is not None])
    vectors = TextVectors(torch.cat([part.values for part in parts]).float(), counts)
    bad = (~vectors.values.isfinite().all(dim=1)).nonzero()
    if len(bad):
        query = int(bad[0]) if counts is None else int(torch.searchsorted(counts.cumsum(0), bad[0], right=True))
        query_id = collator.queries.ids()[rows[query]].decode()
        raise DataError(
            f"encoding: expected finite vectors, got NaN or infinity for query {query_id!r}; look at the checkpoint"
        )
    return vectors
