"""Store a teacher's scores in a file per shard of queries, so that a killed labelling continues."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection
from ranker.data.score_batches import ScoreBatch, ScoreBatches
from ranker.errors import DataError
from ranker.evaluation.scoring import Devices, ScoreCollector, ScoringModule, score_batches
from ranker.files.checksums import REBUILD, zip_fault
from ranker.files.writing import write_whole
from ranker.hashing import digest

log = logging.getLogger(__name__)

FORMAT = 1  # increase this number when the files or the computation of scores change
LOG_SECONDS = 30.0


def candidates_digest(candidates: Candidates) -> str:
    """Return a hash of the queries, their docs and the order of both."""
    queries = json.dumps(candidates.query_ids).encode()
    return digest(queries, candidates.offsets.astype("<i8"), b" ".join(candidates.doc_ids.tolist()))


@dataclass(frozen=True)
class ScoreShards:
    """The scores of candidates in a folder, with one file per `shard_queries` queries.

    Args:
        folder: The folder, whose name is a hash of everything that decides the scores (see `open`).
        candidates: The docs to score.
        shard_queries: Queries per shard.
    """

    folder: Path
    candidates: Candidates
    shard_queries: int

    @classmethod
    def open(
        cls, root: Path, candidates: Candidates, shard_queries: int, description: Mapping[str, Any], name: str
    ) -> ScoreShards:
        """Open the folder `root/HASH`, where HASH depends on the candidates, the shards and the description.

        Args:
            root: Folder of all labels.
            candidates: The docs to score.
            shard_queries: Queries per shard.
            description: Everything else that decides the scores: weights, texts, lengths of texts, precision.
            name: The teacher's name, which `labels.json` shows to people; HASH does not depend on the name.
        """
        content = {
            **description,
            "candidates": candidates_digest(candidates),
            "shard_queries": shard_queries,
            "format": FORMAT,
        }
        folder = root / digest(json.dumps(content, sort_keys=True).encode())[:20]
        if not (folder / "labels.json").is_file():
            with write_whole(folder / "labels.json") as file:
                file.write(json.dumps({"teacher": name, **content}, indent=1) + "\n")
        return cls(folder, candidates, shard_queries)

    def __len__(self) -> int:
        return -(-len(self.candidates) // self.shard_queries)

    def part(self, shard: int) -> Candidates:
        """Return the candidates of a shard."""
        first = shard * self.shard_queries
        last = min(first + self.shard_queries, len(self.candidates))
        offsets = self.candidates.offsets[first : last + 1]
        docs = slice(int(offsets[0]), int(offsets[-1]))
        return Candidates(
            self.candidates.query_ids[first:last],
            offsets - offsets[0],
            self.candidates.doc_ids[docs],
            self.candidates.scores[docs],
        )

    def path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"shard-{shard:05d}.npz"

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """Return this process's shards that are not scored yet; a shard with a damaged file is scored again."""
        found = []
        for shard in range(rank, len(self), world):
            fault = zip_fault(self.path(shard))
            if fault is not None:
                found.append(shard)
            if fault is not None and self.path(shard).exists():
                log.warning("%s: expected a whole file, got %s; it is scored again", self.path(shard), fault)
        return found

    def write(self, shard: int, scores: np.ndarray) -> None:
        """Write the scores of a shard, float32 [pairs]; the file appears complete or not at all."""
        with write_whole(self.path(shard), binary=True) as file:
            np.savez(file, scores=scores.astype(np.float32))

    def read(self) -> np.ndarray:
        """Return the scores of all candidates, float32 [pairs].

        Raises:
            DataError: A shard is missing or damaged.
        """
        return np.concatenate([np.zeros(0, np.float32), *map(self._read, range(len(self)))])

    def _read(self, shard: int) -> np.ndarray:
        path, expected = self.path(shard), len(self.part(shard).doc_ids)
        fault: object = zip_fault(path)
        if fault is None:
            with np.load(path, allow_pickle=False) as arrays:
                scores = np.asarray(arrays["scores"])
            if scores.shape == (expected,):
                return scores
            fault = f"scores of shape {scores.shape}"
        raise DataError(f"{path}: expected {expected} scores, got {fault}; {REBUILD.format(folder=self.folder)}")


def score_missing(
    scorer: ScoringModule,
    collator: Collator,
    collection: Collection,
    shards: ScoreShards,
    devices: Devices,
    max_tokens: int,
    workers: int = 0,
    progress: str | None = None,
) -> int:
    """Score the missing shards of this process, and write each shard as soon as it is complete.

    A batch has pairs of one shard only. So the scores of a shard have the same bits on every process, and with any set
    of existing shards.

    Args:
        scorer: The teacher.
        collator: Makes the teacher's token batches.
        collection: Queries and docs.
        shards: The shards; process `rank` of `world_size` scores shards `rank`, `rank + world_size`, ...
        devices: The devices of the run.
        max_tokens: Token budget of a batch.
        workers: Number of worker processes that collate ahead.
        progress: Title of a progress bar; None shows none.

    Returns:
        Number of pairs that this call scored.

    Raises:
        DataError: A score is not finite.
    """
    numbers = shards.missing(devices.rank, devices.world_size)
    parts = [
        ScoreBatches(replace(collection, candidates=shards.part(shard)), None, collator, max_tokens)
        for shard in numbers
    ]
    writer = _Writer(shards, list(zip(numbers, parts, strict=True)), devices)
    if any(map(len, parts)):
        score_batches(scorer, ConcatDataset(parts), devices, writer.add, workers, progress)
    return writer.pairs


class _Writer:
    """Collects scores batch by batch, and writes a shard after its last batch."""

    def __init__(self, shards: ScoreShards, parts: list[tuple[int, ScoreBatches]], devices: Devices) -> None:
        self._shards, self._collector = shards, ScoreCollector()
        self._alone = Devices(devices.device, 0, 1, devices.autocast)
        self._ends = self._each_end(parts)
        self._started = self._logged = time.perf_counter()
        self.pairs = 0

    def add(self, batch: ScoreBatch, scores: Tensor) -> None:
        """Take a batch's scores [batch, docs]."""
        self._collector.add(batch, scores)
        end = next(self._ends)
        if end is None:
            return
        shard, part = end
        run = self._collector.run(part, self._alone)
        assert run is not None
        self._shards.write(shard, np.array([score for docs in run.values() for score in docs.values()], np.float32))
        self.pairs += part.num_slots
        now = time.perf_counter()
        if now - self._logged > LOG_SECONDS:
            self._logged = now
            log.info("shard %d of %d, %.0f pairs/s", shard + 1, len(self._shards), self.pairs / (now - self._started))

    def _each_end(self, parts: list[tuple[int, ScoreBatches]]) -> Iterator[tuple[int, ScoreBatches] | None]:
        """Yield for each batch the shard whose last batch this is, or None."""
        for shard, part in parts:
            yield from [None] * (len(part) - 1)
            yield shard, part
