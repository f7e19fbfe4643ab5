"""Training steps with negatives that are mined again during the training, and the files of these negatives.

The training is divided into rounds of `every` steps. Round 0 uses the negatives of the data. Round r begins at step r *
`every` and uses newly mined negatives. The data of a step depends only on the number of the step and on the files of
its round.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Collection
from ranker.data.sampling import Pool, PooledGroups
from ranker.data.training_steps import TrainSteps
from ranker.errors import CheckpointError, ConfigError
from ranker.files.checksums import verify_folder
from ranker.files.folders import write_folder
from ranker.types import Run, TrainStep

ARRAYS = ("sizes", "rows", "labels")


class Rounds:
    """The negatives of all rounds, with a folder for each round.

    Args:
        folder: Folder of all rounds; all processes must be able to read it.
        every: Number of optimizer steps of a round.
        epoch_steps: Optimizer steps of an epoch.
    """

    def __init__(self, folder: Path, every: int, epoch_steps: int) -> None:
        self.folder, self.every, self.epoch_steps = folder, every, epoch_steps

    def of(self, epoch: int, index: int) -> int:
        """Return the round of a step.

        >>> rounds = Rounds(Path("mined"), every=4, epoch_steps=6)
        >>> [rounds.of(0, 3), rounds.of(0, 4), rounds.of(1, 1), rounds.of(1, 2)]
        [0, 1, 1, 2]
        """
        return (epoch * self.epoch_steps + index) // self.every

    def path(self, number: int) -> Path:
        """Return the folder of a round."""
        return self.folder / f"round-{number:05d}"

    def write(self, number: int, pool: Pool) -> None:
        """Write the negatives of a round; the folder gets its name when all files are complete."""
        with write_folder(self.path(number)) as folder:
            for name in ARRAYS:
                np.save(folder / f"{name}.npy", getattr(pool, name))

    def read(self, number: int) -> Pool:
        """Read the negatives of a round.

        Raises:
            CheckpointError: The folder of the round is missing or damaged.
        """
        path = self.path(number)
        fix = "resume from an earlier checkpoint, or start again"
        if not path.is_dir():
            raise CheckpointError(f"{path}: expected the mined negatives of round {number}, got no such folder; {fix}")
        verify_folder(path, error=CheckpointError, fix=fix)
        arrays = {name: np.load(path / f"{name}.npy", allow_pickle=False) for name in ARRAYS}
        return Pool(np.cumsum(arrays["sizes"]) - arrays["sizes"], **arrays)

    def copy_from(self, folder: Path, number: int) -> None:
        """Copy a round from the folder of an earlier run's rounds.

        Raises:
            CheckpointError: The folder does not have this round, or the round's files are damaged.
        """
        earlier = Rounds(folder, self.every, self.epoch_steps)
        earlier.read(number)
        if not self.path(number).is_dir():
            with write_folder(self.path(number)) as partial:
                shutil.copytree(earlier.path(number), partial, dirs_exist_ok=True)


class RefreshedSteps(TrainSteps):
    """Training steps with the negatives of their rounds.

    A worker process may prefetch a step whose round is not mined yet. Then the worker uses the negatives that it loaded
    last, and stores their round in `TrainStep.round`. The training builds such a step again with the right negatives.

    Args:
        args: See `TrainSteps`.
        rounds: The rounds.
        options: See `TrainSteps`.

    Raises:
        ConfigError: The negatives of the groups can't be replaced.
    """

    sampler: PooledGroups

    def __init__(self, *args: Any, rounds: Rounds, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.sampler, PooledGroups) or not self.sampler.takes_other_negatives:
            raise ConfigError(
                "mining.every: expected null with triples, and with rows that have a teacher's scores or whose docs "
                "are drawn without regard to their grade (data.alike), since newly mined docs would have no label; set "
                "data.negatives, or mining.every=null"
            )
        self._identity = super().identity()  # identity of the data of round 0
        self._initial, self.sampler = self.sampler.negatives, copy.copy(self.sampler)
        self.rounds, self._round = rounds, 0

    def __getitem__(self, key: tuple[int, int]) -> TrainStep:
        wanted = self.rounds.of(*key)
        if wanted != self._round and (wanted == 0 or self.rounds.path(wanted).is_dir()):
            self.sampler.negatives = self.rounds.read(wanted) if wanted else self._initial
            self._round = wanted
        return replace(super().__getitem__(key), round=self._round)

    def identity(self) -> str:
        """Return a hash of the training data of round 0."""
        return self._identity

    def pool_of(self, run: Run, collection: Collection) -> Pool:
        """Return the mined negatives of each group; a group without mined negatives keeps those of round 0.

        Args:
            run: query_id -> doc_id -> score.
            collection: The collection whose judgements give the label of a mined doc; an unjudged doc has label 0.
        """
        ids = [query_id.decode() for query_id in self.collator.queries.ids()[self.sampler.query_rows]]
        found = [list(run.get(query_id, ())) for query_id in ids]
        rows = np.split(
            self.collator.docs.rows([doc_id for part in found for doc_id in part]),
            np.cumsum([len(part) for part in found])[:-1],
        )
        labels: list[np.ndarray] = []
        for group, (query_id, docs) in enumerate(zip(ids, found, strict=True)):
            judged: Mapping[str, int] = collection.qrels.get(query_id, {})
            labels.append(np.array([max(judged.get(doc_id, 0), 0) for doc_id in docs], dtype=np.float32))
            if not docs:
                initial = self._initial
                part = slice(initial.starts[group], initial.starts[group] + initial.sizes[group])
                rows[group], labels[group] = initial.rows[part], np.maximum(initial.labels[part], 0)
        return Pool.of(rows, labels)
