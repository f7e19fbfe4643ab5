"""Build a compressed index from stored vectors, shard by shard.

Memory holds the k-means sample and one block of vectors. A killed build continues with the first missing part. On the
same type of device it ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from ranker.files.folders import write_folder
from ranker.retrieval.index import refuse_not_finite
from ranker.retrieval.late import centroids as late_centroids
from ranker.retrieval.late.centroids import Centroids, default_count
from ranker.retrieval.late.folder import Settings, Shard, claim, parts_of, read_codec, write_codec, write_shard
from ranker.retrieval.late.residuals import Buckets, fit
from ranker.retrieval.vector_folder import LOG_SECONDS
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)

BLOCK, GPU_BLOCK = 2**16, 2**19  # vectors compressed at a time on a CPU, and on a GPU
MAX_SAMPLE = 2**22  # largest k-means sample, in vectors: 2 GiB for 128 dimensions in float32
SCALES = (0.5, 1.9375)  # bounds of scales, which `doc_kernels` reads as integers below 2
FIT_NUMBERS = 2**22  # about how many elements of residuals the buckets are fitted to


def build(store: VectorStore, bits: int, centroids: int | None, device: str | torch.device = "cpu") -> Path:
    """Build the parts of an index that do not exist yet.

    Args:
        store: The vectors.
        bits: Bits per dimension of a residual, 2 or 4.
        centroids: Number of centroids, at most the number of vectors; None: see `default_count`.
        device: Device of the computation.

    Returns:
        The folder of the index, beside the vectors.

    Raises:
        CheckpointError: The folder has an index of other vectors or with other settings.
        DataError: A vector has NaN or infinity.
    """
    count = min(centroids or default_count(store.num_vectors), max(1, store.num_vectors))
    description = store.description
    settings = Settings(description.digest, description.dim, description.num_shards, store.num_vectors, bits, count)
    own = {"bits": bits, "centroids": count}
    digest = hashlib.blake2b(json.dumps(own, sort_keys=True).encode(), digest_size=5).hexdigest()
    folder = store.folder / f"index-plaid-{digest}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / ".lock"):
        claim(folder, settings)
        if not (folder / "codec").is_dir():
            started = time.perf_counter()
            write_codec(folder, *_learn(store, settings, device))
            log.info("index: %d centroids in %.1f s", count, time.perf_counter() - started)
        codec = read_codec(folder, settings)
        started = logged = time.perf_counter()
        for number, path in enumerate(parts_of(folder, settings)[: settings.num_shards]):
            if not path.is_dir():
                shard = _compressed(store, number, codec, device)
                with write_folder(path) as part:
                    write_shard(part, shard, settings)
            if time.perf_counter() - logged > LOG_SECONDS:
                logged = time.perf_counter()
                log.info("index: shard %d of %d, %.0f s", number + 1, settings.num_shards, logged - started)
    return folder


def _learn(store: VectorStore, settings: Settings, device: str | torch.device) -> tuple[Centroids, Buckets]:
    """Return centroids and buckets from a sample of the vectors."""
    wanted = late_centroids.SAMPLE_PER_CENTROID * settings.centroids
    values = store.sample(min(wanted, max(MAX_SAMPLE, 4 * settings.centroids)))
    if not len(values):
        values = np.zeros((1, settings.dim), dtype=np.float32)
    if not np.isfinite(values).all():
        seen = 0
        for chunk in store.chunks():  # raises an error that names the doc
            refuse_not_finite(store, chunk, seen)
            seen += len(chunk)
    sample = torch.from_numpy(values).to(device)
    found = late_centroids.train(sample, settings.centroids)
    some = sample[:: max(1, len(sample) * settings.dim // FIT_NUMBERS)]
    residuals = some - found.values[found.nearest(some)]
    return found, fit(residuals.flatten().cpu().numpy(), settings.bits)


def _compressed(store: VectorStore, number: int, codec: tuple[Centroids, Buckets], device: str | torch.device) -> Shard:
    """Compress a shard of the vectors."""
    vectors, docs = store.shard(number)
    first = int(store.ends[docs.start - 1]) if docs.start else 0
    for start in range(0, len(vectors), BLOCK):
        refuse_not_finite(store, vectors[start : start + BLOCK], first + start)
    return Shard(*compress(vectors, codec, device), store.counts[docs], store.doc_ids[docs])


def compress(
    vectors: np.ndarray, codec: tuple[Centroids, Buckets], device: str | torch.device = "cpu"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return centroids int64 [vectors], packed residuals uint8 [vectors, bytes] and scales float16 [vectors].

    The scale gives a decompressed vector, the centroid plus the residual, the length of the vector.

    Args:
        vectors: [vectors, dim], of any floating-point type.
        codec: Centroids and buckets.
        device: Where to compute.
    """
    centroids, buckets = codec[0].to(device), codec[1].to(device)
    codes, residuals = [np.zeros(0, dtype=np.int64)], [buckets.pack(centroids.values[:0]).cpu().numpy()]
    scales = [np.zeros(0, dtype=np.float16)]
    size = BLOCK if torch.device(device).type == "cpu" else GPU_BLOCK
    for start in range(0, len(vectors), size):
        block = torch.from_numpy(np.array(vectors[start : start + size])).to(device).float()
        nearest = centroids.nearest(block)
        codes.append(nearest.cpu().numpy())
        packed = buckets.pack(block - centroids.values[nearest])
        residuals.append(packed.cpu().numpy())
        lengths = (centroids.values[nearest] + buckets.unpack(packed, block.shape[1])).norm(dim=1)
        ratios = (block.norm(dim=1) / lengths.clamp(min=1e-20)).clamp(*SCALES)
        scales.append(ratios.half().cpu().numpy())
    return np.concatenate(codes), np.concatenate(residuals), np.concatenate(scales)
