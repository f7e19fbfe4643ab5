"""A folder of vectors of a collection: its description, and its shards.

A folder has `encoded.json` (its `Description`) and a folder per shard with the files

- `vectors.bin`: the vectors of its docs in order, [vectors, dim] of `dtype`;
- `counts.bin`: number of vectors of each doc, int32 [docs]; only where a doc has several;
- `ids.bin`: id of each doc, UTF-8 bytes of one width [docs];
- `meta.json`: first doc, number of docs and of vectors, bytes of an id;

and its checksums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from ranker.errors import CheckpointError, DataError
from ranker.files.checksums import REBUILD, THREADS, verify_folder
from ranker.files.writing import write_whole
from ranker.run_folder import check_unused

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when the files change
LOG_SECONDS = 30


@dataclass(frozen=True)
class Description:
    """What the vectors of a folder were computed from, and how; a folder with another description is refused.

    Args:
        scorer: Hash of weights, tokenizer and settings (`ranker.retrieval.encode.scorer_hash`).
        docs: Fingerprint of the collection's docs.
        num_docs: Number of docs.
        similarity: `cosine` (vectors of length 1) or `dot`; both are searched by inner product.
        dim: Size of a vector.
        several: Whether a doc has a vector per token.
        dtype: Type of the stored vectors: `float32` or `float16`.
        precision: Precision of the forward pass, as Lightning names it.
        max_doc_tokens: Maximum tokens of a doc, without special tokens; longer docs were cut.
        shard_docs: Docs per shard.
        format: Version of the files.
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
        """Short hash of all fields, for folder names."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=10).hexdigest()


def claim(folder: Path, description: Description) -> None:
    """Write the description into a new folder of vectors, or compare it with the one in an existing folder.

    Raises:
        CheckpointError: The folder's vectors are of another model or of other docs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "encoded.json"
    with FileLock(folder / ".lock"):
        if not path.is_file():
            check_unused(
                "encode.folder", folder, [".lock", *(file.name for file in folder.glob(f".*.{path.name}.partial"))]
            )
            with write_whole(path) as file:
                file.write(json.dumps(asdict(description), indent=1) + "\n")
    stored = read_description(folder)
    for key, reason in {
        "scorer": "was computed with other weights, tokenizer or pooling", "similarity": "is for another similarity",
        "docs": "holds other docs", "num_docs": "holds other docs", "format": "has files of another version",
    }.items():  # fmt: skip
        if getattr(stored, key) != getattr(description, key):
            raise CheckpointError(
                f"{folder}: {reason}: {key}: expected {getattr(description, key)!r}, got {getattr(stored, key)!r}; "
                "name another folder or delete it"
            )
    if stored != description:
        other = {key: value for key, value in asdict(stored).items() if value != getattr(description, key)}
        raise CheckpointError(
            f"{folder}: expected vectors of the same settings, got {other}; name another folder, delete it, "
            "or set these values"
        )


def read_description(folder: Path) -> Description:
    """Read the description of a folder of vectors.

    Raises:
        DataError: encoded.json is missing or can't be read.
    """
    try:
        return Description(**json.loads((folder / "encoded.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: expected a folder of vectors with a readable encoded.json, got {error}") from error


def shard_folder(folder: Path, number: int) -> Path:
    """Return the folder of a shard."""
    return folder / f"shard-{number:05d}"


def complete_shards(folder: Path, description: Description) -> list[Path]:
    """Return the folders of all shards, once their files equal their checksums.

    Raises:
        DataError: Shards are missing or damaged; the message names all missing ones.
    """
    shards = [shard_folder(folder, shard) for shard in range(description.num_shards)]
    missing = [shard.name for shard in shards if not (shard / "meta.json").is_file()]
    if missing:
        raise DataError(
            f"{folder}: expected {len(shards)} shards, {', '.join(missing)} missing; encode again, "
            "existing shards are kept"
        )
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(partial(verify_folder, fix=REBUILD), shards))
    if time.monotonic() - started > LOG_SECONDS:
        seconds = time.monotonic() - started
        log.info("%s: compared %d shards with their checksums in %.0f s", folder, len(shards), seconds)
    return shards
