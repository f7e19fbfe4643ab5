"""Refreshed negatives: in regular intervals, encode the docs with the current weights and mine negatives with them.

Sources: ANCE (Xiong et al., 2021, arXiv:2007.00808) and, for the refreshed index, REALM (Guu et al., 2020,
arXiv:2002.08909). Both refresh in parallel to the training, with weights of earlier steps. Here the training waits, so
that its data depend on the weights only and not on the speed of the machine.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ranker.data.datamodule import RankData
from ranker.data.refreshed import RefreshedSteps, Rounds
from ranker.errors import CheckpointError
from ranker.hashing import mix
from ranker.retrieval.encode import Device
from ranker.retrieval.engines import vector_engines
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.mining import Mining
from ranker.retrieval.pipeline import EncodeOptions, encode_sets, mine_set
from ranker.retrieval.vector_engine import LateOptions
from ranker.types import Run, TrainStep

log = logging.getLogger(__name__)


class RefreshedNegatives:
    """Mines the negatives of a round before the round's first step. All processes must call it at the same steps.

    Args:
        rounds: The folder of the rounds, and their first steps.
        mining: Which docs of a ranking become negatives.
        data: The data of the training.
        teacher: A cross-encoder's run that excludes docs as negatives, see `mine`.
        earlier: Folder of the rounds of the run that is resumed.

    Attributes:
        seconds: Total time of encoding and mining so far.
        done: Number of the newest mined round.
    """

    def __init__(
        self, rounds: Rounds, mining: Mining, data: RankData, teacher: Run | None = None, earlier: Path | None = None
    ) -> None:
        self.rounds, self.mining, self.data, self.teacher, self.earlier = rounds, mining, data, teacher, earlier
        self.seconds, self.done = 0.0, 0
        self._mined = 0

    def start(self, module: Any) -> None:
        """Send the folder of the rounds from the first process, which made the run folder, to the others."""
        self.rounds.folder = Path(module.trainer.strategy.broadcast(str(self.rounds.folder), src=0))

    def current(self, step: TrainStep, module: Any) -> TrainStep:
        """Return a step with the negatives of its round; mine them first if this is the round's first step.

        Args:
            step: This device's part of the step.
            module: The `RerankModule`, during a training step.

        Raises:
            CheckpointError: This process does not see the negatives of that round.
        """
        wanted = self.rounds.of(step.epoch, step.index)
        if wanted > self.done:
            started = time.perf_counter()
            self._mine(wanted, module)
            self.done = wanted
            self.seconds += time.perf_counter() - started
            self._mined += 1
        if step.round == wanted:
            return step
        steps: RefreshedSteps = module.trainer.train_dataloader.steps
        again = steps[step.epoch, step.index]
        if again.round != wanted:
            raise CheckpointError(
                f"{self.rounds.path(wanted)}: expected the mined negatives of round {wanted} in a folder that all "
                "processes share, got no such folder; start the training in a folder on a disk of all machines"
            )
        return again.to(module.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the newest round, the time and the count of rounds, for a checkpoint."""
        return {"round": self.done, "seconds": self.seconds, "mined": self._mined}

    def load_state_dict(self, state: dict[str, Any], module: Any) -> None:
        """Continue at the round of a checkpoint.

        Raises:
            CheckpointError: The negatives of that round are missing or damaged.
        """
        self.done, self.seconds, self._mined = state["round"], state["seconds"], state["mined"]
        if self.done and self.earlier is not None:
            if module.trainer.is_global_zero:
                self.rounds.folder.mkdir(exist_ok=True)
                self.rounds.copy_from(self.earlier, self.done)
            module.trainer.strategy.barrier()

    def report(self) -> dict[str, Any]:
        """Return the number of mined rounds, and their time in seconds."""
        return {"rounds": self._mined, "seconds": self.seconds}

    def _mine(self, number: int, module: Any) -> None:
        """Encode the docs with the current weights on all devices, and write the negatives of a round."""
        trainer, scorer, started = module.trainer, module.scorer, time.perf_counter()
        collection, steps = self.data.splits.train, trainer.train_dataloader.steps
        assert collection is not None and isinstance(steps, RefreshedSteps)
        vectors = self.rounds.folder / "vectors"
        options = self.data.batch_options
        device = Device(
            module.device,
            trainer.precision_plugin.forward_context,
            trainer.global_rank,
            trainer.world_size,
            options.eval_max_tokens or options.max_tokens,
        )
        if trainer.is_global_zero:
            self.rounds.folder.mkdir(exist_ok=True)
            shutil.rmtree(vectors, ignore_errors=True)  # left by a run that was killed during a refresh
        trainer.strategy.barrier()
        modes = [(part, part.training) for part in scorer.modules()]
        try:
            sets = {"train": collection}
            folders = encode_sets(
                scorer, self.data, sets, EncodeOptions(vectors, vectors), device, str(trainer.precision)
            )
            trainer.strategy.barrier()
            encoded = time.perf_counter() - started
            if trainer.is_global_zero:
                index = Sparse() if scorer.vectors == "terms" else Flat()
                (engine,) = vector_engines(scorer, self.data, sets, folders, index, device, LateOptions()).values()
                mining = replace(self.mining, seed=int(mix(self.mining.seed, number)))
                run = mine_set(engine, collection, mining, self.teacher)
                self.rounds.write(number, steps.pool_of(run, collection))
                shutil.rmtree(vectors)
                log.info(
                    "mining: round %d, step %d: %d docs encoded in %.1f s, %d negatives of %d queries, %.1f s in all",
                    number,
                    trainer.global_step,
                    len(collection.docs),
                    encoded,
                    sum(map(len, run.values())),
                    len(run),
                    time.perf_counter() - started,
                )
            trainer.strategy.barrier()
        finally:
            for part, training in modes:
                part.training = training
            # autocast's cached weights have no graph: with them, the next step would have no gradient
            torch.clear_autocast_cache()
