"""A collection's vectors on disk: encoded by any number of devices in shards, each doc once, its id beside its vectors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ranker.data.collate import Collator
from ranker.data.step_plan import fill
from ranker.data.token_store import TokenStore
from ranker.data.token_writer import map_array, tokenizer_fingerprint
from ranker.errors import CheckpointError, DataError
from ranker.files import REBUILD, THREADS, verify_folder, write_folder, write_whole
from ranker.interactions.maxsim import TextVectors
from ranker.run_folder import check_unused

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when the files change
DTYPES = ("float32", "float16")
LOG_SECONDS = 30


@dataclass(frozen=True)
class Description:
    """What a folder of vectors was made of; anything else made of it is refused.

    Args:
        scorer: Hash of weights, tokenizer and settings.
        docs: Fingerprint of the collection's docs.
        num_docs: Number of docs.
        similarity: `cosine` or `dot`; both are searched by inner product, cosine's vectors have length 1.
        dim: Size of a vector.
        several: Whether a doc has a vector per token.
        dtype: Of the stored vectors.
        precision: Of the computation, as Lightning names it.
        max_doc_tokens: Longest doc without special tokens; longer ones were cut.
        shard_docs: Docs per shard.
    """

    scorer: str
    docs: str
    num_docs: int
    similarity: str
    dim: int
    several: bool
    dtype: str
    precision: str
    max_doc_tokens: int
    shard_docs: int
    format: int = FORMAT

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.num_docs // self.shard_docs)

    @property
    def digest(self) -> str:
        """Short hash for folder names."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=10).hexdigest()


ARCHITECTURE = (
    "model_type",
    "num_attention_heads",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)  # what weights do not show


def scorer_hash(scorer: Any) -> str:
    """Hash of all that decides a text's vectors: weights, architecture, tokenizer, pooling and the like."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(scorer.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    for encoder in (scorer.encoder, getattr(scorer, "doc_encoder", None) or scorer.encoder):
        digest.update(repr([getattr(encoder.config, key, None) for key in ARCHITECTURE]).encode())
    digest.update(tokenizer_fingerprint(scorer.encoder.tokenizer).encode())
    digest.update(json.dumps(scorer.settings(), sort_keys=True).encode())
    return digest.hexdigest()


def describe(
    scorer: Any, docs: TokenStore, fingerprint: str, max_doc_tokens: int, dtype: str, precision: str, shard_docs: int
) -> Description:
    """What encoding these docs by this scorer would make."""
    if dtype not in DTYPES:
        raise DataError(f"dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
    return Description(
        scorer_hash(scorer),
        fingerprint,
        len(docs),
        scorer.similarity,
        scorer.dim,
        hasattr(scorer, "doc_vectors"),
        dtype,
        precision,
        max_doc_tokens,
        shard_docs,
    )


def claim(folder: Path, description: Description) -> None:
    """Write the description into a new folder of vectors, or compare it with the one that is there.

    Raises:
        CheckpointError: The folder's vectors are of another model or of other docs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "encoded.json"
    with FileLock(folder / ".lock"):
        if not path.is_file():
            check_unused(
                "encode.folder", folder, [".lock", *(begun.name for begun in folder.glob(f".*.{path.name}.partial"))]
            )
            with write_whole(path) as file:
                file.write(json.dumps(asdict(description), indent=1) + "\n")
    there = read_description(folder)
    for key, reason in {
        "scorer": "was made by other weights, tokenizer or pooling", "similarity": "is for another similarity",
        "docs": "holds other docs", "num_docs": "holds other docs", "format": "is of another version",
    }.items():  # fmt: skip
        if getattr(there, key) != getattr(description, key):
            raise CheckpointError(
                f"{folder}: {reason}: {key}: expected {getattr(description, key)!r}, got {getattr(there, key)!r}; name another folder or delete it"
            )
    if there != description:
        other = {key: value for key, value in asdict(there).items() if value != getattr(description, key)}
        raise CheckpointError(
            f"{folder}: expected vectors of the same settings, got {other}; name another folder, delete it, or set these"
        )


def read_description(folder: Path) -> Description:
    """The description in a folder of vectors.

    Raises:
        DataError: There is none, or it can't be read.
    """
    try:
        return Description(**json.loads((folder / "encoded.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: expected a folder of vectors with a readable encoded.json, got {error}") from error


@dataclass(frozen=True)
class Device:
    """Where to compute, and which share of the shards is this process's.

    Args:
        device: The device.
        autocast: Context of the forward passes' precision.
        rank: This process.
        world: Number of processes.
        max_tokens: Token budget of a batch.
    """

    device: str | torch.device = "cpu"
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    rank: int = 0
    world: int = 1
    max_tokens: int = 16384


def encode_docs(scorer: Any, collator: Collator, folder: Path, description: Description, where: Device) -> int:
    """Encode the shards of this process that are not there yet; memory does not grow with the collection.

    A shard's bytes depend on its docs alone, not on who encodes it nor on what was there. It appears whole or not at
    all.

    Args:
        scorer: The bi-encoder, on the device.
        collator: Holds the docs' token store.
        folder: Where the shards go; `claim` it first.
        description: What is made.
        where: Device and share.

    Returns:
        Number of docs encoded now.

    Raises:
        DataError: A doc's vector is not finite.
    """
    scorer.eval()
    done, started, told = 0, time.perf_counter(), time.perf_counter()
    for shard in range(where.rank, description.num_shards, where.world):
        path = _shard(folder, shard)
        with FileLock(folder / f".{path.name}.lock"):  # against another run over the same folder
            if path.is_dir():
                continue
            rows = np.arange(
                shard * description.shard_docs, min((shard + 1) * description.shard_docs, description.num_docs)
            )
            with write_folder(path) as unfinished:
                _encode_shard(scorer, collator, rows, unfinished, description, where)
        done += len(rows)
        if time.perf_counter() - told > LOG_SECONDS:
            told = time.perf_counter()
            log.info(
                "encoding: shard %d of %d, %.0f docs/s", shard + 1, description.num_shards, done / (told - started)
            )
    return done


def _shard(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}"


def _encode_shard(
    scorer: Any, collator: Collator, rows: np.ndarray, folder: Path, description: Description, where: Device
) -> None:
    """Write one shard's files: vectors in the order of the docs, counts where a doc has several, ids."""
    lengths = collator.doc.row_lengths(collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))
    order = np.argsort(-lengths, kind="stable")
    batches = fill(order, lengths[order], where.max_tokens)
    counts = np.ones(len(rows), dtype=np.int32)
    if description.several:
        for batch in batches:
            counts[batch] = scorer.doc_vectors(collator.doc_batch(rows[batch]).to(where.device)).cpu().numpy()
        counts.astype("<i4").tofile(folder / "counts.bin")
    ends = np.cumsum(counts, dtype=np.int64)
    ids = collator.docs.ids()[rows]
    ids.tofile(folder / "ids.bin")
    vectors = np.memmap(folder / "vectors.bin", description.dtype, "w+", shape=(int(ends[-1]), description.dim))
    for batch in batches:
        with np.errstate(over="ignore"):  # infinity is refused below
            values = _vectors(scorer.encode_docs, collator.doc_batch(rows[batch]), where).astype(description.dtype)
        if not np.isfinite(values).all():
            bad = np.repeat(batch, counts[batch])[np.flatnonzero(~np.isfinite(values).all(axis=1))[0]]
            raise DataError(
                f"encoding: expected finite vectors, got NaN or infinity in that of doc {ids[bad].decode()!r} as {description.dtype}; "
                "look at the checkpoint, or set encode.dtype=float32"
            )
        within = np.arange(len(values)) - np.repeat(np.cumsum(counts[batch]) - counts[batch], counts[batch])
        vectors[np.repeat(ends[batch] - counts[batch], counts[batch]) + within] = values
    vectors.flush()
    meta = {"first": int(rows[0]), "docs": len(rows), "vectors": int(ends[-1]), "id_bytes": ids.dtype.itemsize}
    (folder / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")


def _vectors(encode: Callable[[Any], TextVectors], batch: Any, where: Device) -> np.ndarray:
    with torch.inference_mode(), where.autocast():
        return encode(batch.to(where.device)).values.float().cpu().numpy()


def encode_queries(scorer: Any, collator: Collator, rows: np.ndarray, where: Device) -> TextVectors:
    """The vectors of queries, in their order, on the host.

    Raises:
        DataError: A query's vector is not finite.
    """
    scorer.eval()
    lengths = collator.query.row_lengths(collator.query_lengths(rows))
    parts = []
    for batch in fill(np.arange(len(rows)), lengths, where.max_tokens):
        with torch.inference_mode(), where.autocast():
            parts.append(
                scorer.encode_queries(collator.query_batch(rows[batch]).to(where.device)).to("cpu", non_blocking=False)
            )
    if not parts:
        return TextVectors(
            torch.zeros(0, scorer.dim), torch.zeros(0, dtype=torch.int64) if hasattr(scorer, "doc_vectors") else None
        )
    counts = None if parts[0].counts is None else torch.cat([part.counts for part in parts if part.counts is not None])
    vectors = TextVectors(torch.cat([part.values for part in parts]).float(), counts)
    bad = (~vectors.values.isfinite().all(dim=1)).nonzero()
    if len(bad):
        owner = int(bad[0]) if counts is None else int(torch.searchsorted(counts.cumsum(0), bad[0], right=True))
        query_id = collator.queries.ids()[rows[owner]].decode()
        raise DataError(
            f"encoding: expected finite vectors, got NaN or infinity in that of query {query_id!r}; look at the checkpoint"
        )
    return vectors


def _read_shard(folder: Path, number: int, description: Description) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors [vectors, dim], mapped; ids, UTF-8 bytes [docs]; counts, int64 [docs]."""
    docs = min(description.shard_docs, description.num_docs - number * description.shard_docs)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        vectors = map_array(folder / "vectors.bin", description.dtype).reshape(-1, description.dim)
        ids = np.fromfile(folder / "ids.bin", dtype=f"S{meta['id_bytes']}")
        several = description.several
        counts = (
            np.fromfile(folder / "counts.bin", dtype="<i4").astype(np.int64)
            if several
            else np.ones(docs, dtype=np.int64)
        )
        if not len(ids) == len(counts) == meta["docs"] == docs or not len(vectors) == counts.sum() == meta["vectors"]:
            raise ValueError(f"{len(ids)} ids, {len(counts)} counts and {len(vectors)} vectors for {docs} docs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: expected a whole shard, got {error}; {REBUILD.format(folder=folder)}") from error
    return vectors, ids, counts


class Encoded:
    """Read side of a complete folder of vectors; nothing is held in memory but ids and counts.

    Attributes:
        description: What the vectors were made of.
        doc_ids: The id of each doc, UTF-8 in a fixed-width bytes array [docs].
        counts: Vectors of each doc, int64 [docs].
        ends: Cumulative counts, int64 [docs].

    Raises:
        DataError: Shards are missing or damaged; all missing ones are named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.description = folder, read_description(folder)
        shards = [_shard(folder, shard) for shard in range(self.description.num_shards)]
        missing = [shard.name for shard in shards if not (shard / "meta.json").is_file()]
        if missing:
            raise DataError(
                f"{folder}: expected {len(shards)} shards, {', '.join(missing)} missing; encode again, what is there is not done twice"
            )
        self._vectors, ids, counts = [], [], []
        started = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(partial(verify_folder, fix=REBUILD), shards))
        if time.monotonic() - started > LOG_SECONDS:
            log.info(
                "%s: compared %d shards with their checksums in %.0f s", folder, len(shards), time.monotonic() - started
            )
        for number, shard in enumerate(shards):
            vectors, own_ids, own_counts = _read_shard(shard, number, self.description)
            self._vectors.append(vectors)
            ids.append(own_ids)
            counts.append(own_counts)
        self.doc_ids = np.concatenate(ids) if ids else np.array([], dtype="S1")
        self.counts = np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self._shard_ends = np.cumsum([len(part) for part in self._vectors])

    @property
    def num_docs(self) -> int:
        """Number of docs."""
        return len(self.counts)

    @property
    def num_vectors(self) -> int:
        """Number of vectors."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_bytes(self) -> int:
        """Size of the vectors on disk."""
        return sum(part.nbytes for part in self._vectors)

    def chunks(self, most: int = 65536) -> Iterator[np.ndarray]:
        """All vectors in order, float32, at most so many at a time."""
        for part in self._vectors:
            for start in range(0, len(part), most):
                yield np.ascontiguousarray(part[start : start + most], dtype=np.float32)

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """So many vectors (or all), drawn without replacement, float32."""
        if count >= self.num_vectors:
            return (
                np.concatenate(list(self.chunks()))
                if self._vectors
                else np.zeros((0, self.description.dim), dtype=np.float32)
            )
        return self._at(np.sort(np.random.default_rng(seed).choice(self.num_vectors, count, replace=False)))

    def take(self, rows: np.ndarray) -> TextVectors:
        """The vectors of docs, in the order asked for."""
        counts = self.counts[rows]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        values = torch.from_numpy(self._at(np.repeat(self.ends[rows] - counts, counts) + within))
        return TextVectors(values, torch.from_numpy(counts) if self.description.several else None)

    def _at(self, places: np.ndarray) -> np.ndarray:
        """Vectors by their places over all shards, float32."""
        out = np.empty((len(places), self.description.dim), dtype=np.float32)
        shards = np.searchsorted(self._shard_ends, places, side="right")
        for shard in np.unique(shards):
            here = shards == shard
            start = self._shard_ends[shard - 1] if shard else 0
            out[here] = self._vectors[shard][places[here] - start]
        return out
