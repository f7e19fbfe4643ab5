"""The file of a faiss index beside its vectors, with a JSON file of what the index depends on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ranker.errors import CheckpointError, DataError
from ranker.files.checksums import checksum, verify
from ranker.files.writing import write_whole
from ranker.retrieval.index_type import IndexType
from ranker.retrieval.vector_store import VectorStore


def index_path(index_type: IndexType, store: VectorStore) -> Path:
    """Return the path of the index of a type beside its vectors."""
    return store.folder / f"index-{type(index_type).__name__.lower()}-{_digest(index_type)}.faiss"


def index_meta(index_type: IndexType, store: VectorStore) -> dict[str, Any]:
    """Return what a stored index depends on: its vectors and its options."""
    return {
        "vectors": store.description.digest,
        "num_vectors": store.num_vectors,
        "metric": "inner product",
        "kind": repr(_settings(index_type)),
    }


def write_index(faiss: Any, index: Any, path: Path, meta: dict[str, Any]) -> None:
    """Write an index, and beside it a JSON file with `meta` and the checksum of the index."""
    with write_whole(path, binary=True) as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
    with write_whole(path.with_suffix(".json")) as file:
        file.write(json.dumps({**meta, "file": checksum(path)}) + "\n")


def read_index(faiss: Any, path: Path, meta: dict[str, Any]) -> Any:
    """Read an index if its JSON file agrees with `meta`; an index of an earlier version has no checksum.

    Raises:
        DataError: A file is damaged.
        CheckpointError: The JSON file has another `meta`.
    """
    fix = f"delete {path}, it is built anew"
    try:
        stored_meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        stored_checksum = stored_meta.pop("file", None)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path.with_suffix('.json')}: expected a readable file, got {error}; {fix}") from error
    if stored_meta != meta:
        raise CheckpointError(f"{path}: expected an index of {meta}, got one of {stored_meta}; {fix}")
    if stored_checksum is not None:
        verify(path.parent, {path.name: stored_checksum}, f"the file is damaged; {fix}")
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path}: expected an index that faiss can read, got {' '.join(str(error).split())[:200]}; {fix}"
        ) from error


def _settings(index_type: IndexType) -> dict[str, Any]:
    """Return the options that determine the stored index; search options may change later."""
    search_options = ("gpu", "probes", "rescore", "search_depth")
    return {key: value for key, value in sorted(vars(index_type).items()) if key not in search_options}


def _digest(index_type: IndexType) -> str:
    return hashlib.blake2b(json.dumps(_settings(index_type), sort_keys=True).encode(), digest_size=5).hexdigest()
