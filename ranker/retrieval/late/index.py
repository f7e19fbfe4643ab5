"""A compressed late-interaction index: search it, add docs, and delete docs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ranker.errors import DataError
from ranker.files.folders import write_folder
from ranker.files.writing import write_whole
from ranker.interactions.maxsim import TextVectors
from ranker.retrieval.late.arrays import Arrays, Effort
from ranker.retrieval.late.build import compress
from ranker.retrieval.late.exact import exact_scores, query_vectors
from ranker.retrieval.late.folder import (
    Shard,
    parts_of,
    read_codec,
    read_deleted,
    read_settings,
    read_shard,
    write_shard,
)
from ranker.retrieval.late.tensor_search import TensorSearch
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)

Ranked = tuple[np.ndarray, np.ndarray]  # rows of docs, int64 [docs], and their scores, float32 [docs]
LISTED = 300_000  # with `probes` 0, about how many docs are in the lists of all centroids that a query probes
PROBED = 35_000  # in `CPUSearch`, about how many vectors are at the centroids that a token probes; see `probes_of`
LEAST_PROBES, LEAST_CANDIDATES, LEAST_RESCORED = 8, 500, 100
EXHAUSTIVE = 2**22  # up to this many stored vectors in a GPU's memory, all docs are compared by them
RESCORED, CPU_RESCORED = 3.0, 1.8  # `rescore` 0: docs that are scored exactly, in multiples of the depth
SHARED = 12  # with `probes` 0: a query is assumed to probe SHARED * probes different centroids


def numba_compiles() -> bool:
    """Return whether numba is installed and compiles functions here; the log says why an installed one does not."""
    if find_spec("numba") is None:
        return False
    try:
        from numba import config
    except ImportError as error:  # numba refuses versions of numpy that are newer than itself
        log.warning("index=plaid: torch searches instead of numba, which can't be imported: %s", error)
        return False
    options: Any = config
    if options.DISABLE_JIT:
        log.warning("index=plaid: torch searches instead of numba, because NUMBA_DISABLE_JIT is set")
    return not options.DISABLE_JIT


class LateIndex:
    """An opened index.

    Args:
        folder: The folder of the index, within the folder of the vectors.
        store: The stored vectors; None: exact scores are computed from decompressed vectors.
        effort: How many centroids and docs a search compares. Here `candidates` and `rescore` are multiples of the
            requested number of docs. `probes` 0 and `rescore` 0 choose numbers, see `LISTED`, `PROBED` and `RESCORED`.
        device: Device of the search.

    Attributes:
        doc_ids: The id of each doc, UTF-8 [docs], deleted ones included.
        deleted: Rows of deleted docs.
        num_bytes: Size of the files.
        stages: Seconds that searches spent to find candidates and to compute exact scores.

    Raises:
        DataError: A part of the index is missing or damaged.
    """

    def __init__(
        self, folder: Path, store: VectorStore | None, effort: Effort, device: str | torch.device = "cpu"
    ) -> None:
        self.folder, self._store, self._effort, self.device = folder, store, effort, torch.device(device)
        self.settings = read_settings(folder)
        self._codec = read_codec(folder, self.settings)
        self.stages = Stages()
        self._open()

    def _open(self) -> None:
        """Read all shards."""
        num_bytes = -(-self.settings.dim * self.settings.bits // 8)
        parts = parts_of(self.folder, self.settings)
        shards = [read_shard(path, self.settings, num_bytes) for path in parts]
        empty = Shard(
            np.zeros(0, "u2"), np.zeros((0, num_bytes), "u1"), np.zeros(0, "f2"), np.zeros(0, int), np.zeros(0, "S1")
        )
        self._shards = shards or [empty]
        self.deleted = read_deleted(self.folder)
        self.doc_ids = np.concatenate([shard.ids for shard in self._shards])
        self.arrays = Arrays.of(self._codec, self._shards, self.deleted)
        self._counts = self.arrays.ends - np.concatenate([[0], self.arrays.ends[:-1]])[: len(self.arrays.ends)]
        self._starts = np.cumsum([0, *(len(shard.ids) for shard in self._shards)])
        self.num_bytes = sum(path.stat().st_size for path in self.folder.rglob("*.bin") if path.name != "vectors.bin")
        self._tensors: TensorSearch | None = None
        self._cpu: Any = None
        if self.device.type == "cpu" and numba_compiles():
            from ranker.retrieval.late.cpu_search import CPUSearch

            self._cpu = CPUSearch(self.arrays)
        else:
            self._tensors = TensorSearch(self.arrays, self.device)
            if self._store is not None and not self._added:
                self._tensors.load(self._store)

    @property
    def _added(self) -> bool:
        """Whether docs were added, whose vectors are not among the stored ones."""
        return len(self._shards) > self.settings.num_shards

    @property
    def num_docs(self) -> int:
        """Number of docs without the deleted ones."""
        return len(self.doc_ids) - len(self.deleted)

    def rank(self, queries: TextVectors, depth: int) -> list[Ranked]:
        """Return the candidates of each query with their exact scores, unsorted; often more than `depth`.

        Args:
            queries: Vectors of the queries, float32, in main memory.
            depth: Requested number of docs per query.
        """
        effort, present = self._effort_for(depth), np.delete(np.arange(len(self.doc_ids)), self.deleted)
        if self._tensors is not None and self._tensors.stored is not None:
            exhaustive = len(self.arrays.codes) <= EXHAUSTIVE
            return self._tensors.rank(queries, present, effort, exhaustive, self.stages)
        texts = query_vectors(queries)
        with self.stages("candidates"):
            if self.num_docs <= effort.rescore:
                rows = [present] * len(texts)
            elif self._tensors is None:
                numbers = [effort.probes] * len(texts), [int(effort.rescore)] * len(texts)
                rows = self._parallel(self._cpu.candidates, texts, *numbers)
            else:
                rows = self._tensors.candidates(queries, present, effort)
        with self.stages("exact"):
            scores = self._parallel(self.exact, texts, rows)
        return list(zip(rows, scores, strict=True))

    def _effort_for(self, depth: int) -> Effort:
        """Return the numbers of centroids and docs that a search for `depth` docs compares."""
        lists = len(self.arrays.centroids.values)
        probes = self._effort.probes
        if not probes and (self._tensors is None or not self._tensors.by_kernel):  # with a kernel, there are no lists
            if self._cpu is not None:
                probes = PROBED * lists // max(1, len(self.arrays.codes))
            else:
                probes = int(LISTED / max(1.0, len(self.arrays.entries) / lists) / SHARED)
        share = self._effort.rescore or (RESCORED if self._cpu is None else CPU_RESCORED)
        rescore = max(int(share * depth), LEAST_RESCORED)
        candidates = max(self._effort.candidates * depth, LEAST_CANDIDATES, rescore)
        return Effort(min(max(probes, LEAST_PROBES), lists), candidates, rescore)

    def _parallel(self, call: Any, *arguments: Sequence[Any]) -> list[Any]:
        """Call a function once per query; on a CPU, on as many threads as torch uses."""
        threads = min(torch.get_num_threads(), len(arguments[0]))
        if threads < 2 or self.device.type != "cpu":
            return list(map(call, *arguments))
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(call, *arguments))

    def exact(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the MaxSim of a query with docs, float32 [docs]; for their vectors see `vectors`.

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            rows: Rows of the docs, int64 [docs].
        """
        if self._cpu is not None and self._store is not None and not self._added:
            return self._cpu.exact(query, rows, self._store)  # type: ignore[no-any-return]
        return exact_scores(query, rows, self.vectors)

    def vectors(self, row: int) -> np.ndarray:
        """Return the vectors of a doc, float32 [vectors, dim]: stored, or decompressed if there is no store."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        own = self._shards[part].vectors
        if own is None and self._store is not None:
            return self._store.of_doc(row).astype(np.float32, copy=False)
        last = self.arrays.ends[row]
        some = slice(last - self._counts[row], last)
        if own is not None:
            first = self.arrays.ends[self._starts[part] - 1] if part else 0
            return own[some.start - first : some.stop - first]
        codes = torch.from_numpy(self.arrays.codes[some].astype(np.int64))
        packed = torch.from_numpy(np.array(self.arrays.residuals[some]))
        centroids, buckets = self._codec
        scales = torch.from_numpy(self.arrays.scales[some].astype(np.float32))
        return ((centroids.values[codes] + buckets.unpack(packed, self.settings.dim)) * scales.unsqueeze(1)).numpy()

    def add(self, doc_ids: Sequence[str], vectors: TextVectors) -> None:
        """Add docs. The centroids do not change.

        Args:
            doc_ids: Their ids; none may be in the index.
            vectors: Their vectors from the model of the index, float32.

        Raises:
            DataError: An id is in the index already, or twice in `doc_ids`; or a vector has NaN, infinity or a wrong
                size.
        """
        ids = np.array([doc_id.encode() for doc_id in doc_ids], dtype=np.bytes_)
        values = vectors.values.cpu().float().numpy()
        assert vectors.counts is not None
        counts = vectors.counts.cpu().numpy()
        if values.shape[1] != self.settings.dim or len(counts) != len(ids):
            raise DataError(
                f"{self.folder}: expected vectors of {self.settings.dim} of {len(ids)} docs, got vectors of "
                f"{values.shape[1]} of {len(counts)}"
            )
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            doc = doc_ids[int(np.searchsorted(np.cumsum(counts), bad[0], side="right"))]
            raise DataError(f"{self.folder}: expected finite vectors, got NaN or infinity for doc {doc!r}")
        with FileLock(self.folder / ".lock"):
            self._open()
            known = np.isin(ids, np.delete(self.doc_ids, self.deleted))
            if known.any() or len(np.unique(ids)) < len(ids):
                again = ids[known][0] if known.any() else next(i for i in ids if (ids == i).sum() > 1)
                raise DataError(
                    f"{self.folder}: expected ids of new docs, got {again.decode()!r} again; delete it first"
                )
            path = self.folder / f"added-{len(self._shards) - self.settings.num_shards:05d}"
            with write_folder(path) as part:
                write_shard(part, Shard(*compress(values, self._codec), counts, ids, values), self.settings)
            self._open()

    def delete(self, doc_ids: Sequence[str]) -> None:
        """Delete docs, so that searches no longer return them.

        Args:
            doc_ids: Their ids.

        Raises:
            DataError: The index has no such doc.
        """
        with FileLock(self.folder / ".lock"):
            self._open()
            present = np.delete(np.arange(len(self.doc_ids)), self.deleted)
            rows = dict(zip(self.doc_ids[present].tolist(), present.tolist(), strict=True))
            missing = [doc_id for doc_id in doc_ids if doc_id.encode() not in rows]
            if missing:
                raise DataError(f"{self.folder}: expected ids of docs of the index, got {missing[0]!r}")
            gone = {*self.deleted.tolist(), *(rows[doc_id.encode()] for doc_id in doc_ids)}
            with write_whole(self.folder / "deleted.json") as file:
                file.write(json.dumps(sorted(gone)) + "\n")
            self._open()
