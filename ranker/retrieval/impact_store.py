"""Term weights (impacts) of a collection on disk: a folder of shards, which hold the docs' ids and sparse vectors.

A folder has `encoded.json` (its `Description`) and a folder per shard with the files

- `offsets.bin`: doc r has the entries `offsets[r]` to `offsets[r + 1]`, int64 [docs + 1];
- `words.bin`: the word of each entry, ascending in each doc, int32 [entries];
- `impacts.bin`: its weight, above 0, of `dtype` [entries];
- `ids.bin`: id of each doc, UTF-8 bytes of one width [docs];
- `meta.json`: first doc, number of docs and of entries, bytes of an id;

and its checksums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from ranker.errors import DataError
from ranker.files.checksums import REBUILD
from ranker.retrieval.vector_folder import Description, complete_shards, read_description


def write_impacts(folder: Path, description: Description, first: int, ids: np.ndarray, rows: Any) -> None:
    """Write the files of one shard into an existing, empty folder.

    Args:
        folder: The folder.
        description: What the weights are computed from.
        first: Row of the first doc in the collection.
        ids: UTF-8 ids [docs].
        rows: Weights of the docs, a scipy CSR matrix [docs, words] with ascending words in each row.
    """
    rows.indptr.astype("<i8").tofile(folder / "offsets.bin")
    rows.indices.astype("<i4").tofile(folder / "words.bin")
    rows.data.astype(description.dtype).tofile(folder / "impacts.bin")
    (folder / "ids.bin").write_bytes(ids.data)
    meta = {"first": first, "docs": len(ids), "entries": int(rows.nnz), "id_bytes": ids.dtype.itemsize}
    (folder / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")


def _read_shard(folder: Path, number: int, description: Description) -> tuple[Any, np.ndarray]:
    """Return the weights of a shard's docs, CSR float32 [docs, words], and the docs' ids, UTF-8 bytes [docs]."""
    num_docs = min(description.shard_docs, description.num_docs - number * description.shard_docs)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        offsets = np.fromfile(folder / "offsets.bin", dtype="<i8")
        words = np.fromfile(folder / "words.bin", dtype="<i4")
        impacts = np.fromfile(folder / "impacts.bin", dtype=description.dtype).astype(np.float32)
        ids = np.fromfile(folder / "ids.bin", dtype=f"S{meta['id_bytes']}")
        fits = len(ids) == len(offsets) - 1 == meta["docs"] == num_docs
        if not (fits and len(words) == len(impacts) == offsets[-1] == meta["entries"]):
            raise ValueError(f"{len(ids)} ids, {len(words)} words and {len(impacts)} weights for {num_docs} docs")
        if len(words) and not 0 <= words.min() <= words.max() < description.dim:
            raise ValueError(f"words from {words.min()} to {words.max()}, of {description.dim}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: expected a whole shard, got {error}; {REBUILD.format(folder=folder)}") from error
    return sparse.csr_matrix((impacts, words, offsets), shape=(num_docs, description.dim)), ids


class ImpactStore:
    """Read a complete folder of term weights into memory.

    Args:
        folder: The folder.

    Attributes:
        description: What the weights were computed from.
        doc_ids: The id of each doc, UTF-8 in a fixed-width bytes array [docs].
        matrix: The weights, CSR float32 [docs, words].

    Raises:
        DataError: Shards are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.description = folder, read_description(folder)
        shards = complete_shards(folder, self.description)
        read = [_read_shard(shard, number, self.description) for number, shard in enumerate(shards)]
        self.doc_ids = np.concatenate([ids for _, ids in read]) if read else np.array([], dtype="S1")
        empty = sparse.csr_matrix((0, self.description.dim), dtype=np.float32)
        self.matrix: Any = sparse.vstack([empty, *(rows for rows, _ in read)], format="csr")
        self.num_bytes = sum(path.stat().st_size for shard in shards for path in shard.glob("*.bin"))

    @property
    def num_docs(self) -> int:
        """Number of docs."""
        return len(self.doc_ids)
