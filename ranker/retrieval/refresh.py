"""Refreshed negatives: between two steps, the docs are encoded with the current weights, and negatives are mined.

Sources: ANCE (Xiong et al., 2021, arXiv:2007.00808) and, for the refreshed index, REALM (Guu et al., 2020,
arXiv:2002.08909). Both refresh in parallel to the training, with weights of some steps before; here the training waits,
so that its data depend on the weights alone.
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
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.mining import Mining
from ranker.retrieval.pipeline import EncodeOptions, encode_sets, mine_set, vector_engines
from ranker.retrieval.search import LateOptions
from ranker.types import Run, TrainStep

log = logging.getLogger(__name__)


class RefreshedNegatives:
    """Mines the negatives of each round when its first step comes; all processes call it at the same steps.

    Args:
        rounds: Where the rounds are, and when they begin.
        mining: Which docs of a ranking become negatives.
        data: The training's data.
        teacher: A run for denoising, see `mine`.
        earlier: Folder of the rounds of the run that is resumed.

    Attributes:
        seconds: Time that encoding and mining took so far.
        done: The newest round.
    """

    def __init__(
        self, rounds: Rounds, mining: Mining, data: RankData, teacher: Run | None = None, earlier: Path | None = None
    ) -> None:
        self.rounds, self.mining, self.data, self.teacher, self.earlier = rounds, mining, data, teacher, earlier
        self.seconds, self.done = 0.0, 0
        self._mined = 0

    def start(self, module: Any) -> None:
        """Make the folder known to all processes: only the first one knows the run folder."""
        self.rounds.folder = Path(module.trainer.strategy.broadcast(str(self.rounds.folder), src=0))

    def current(self, step: TrainStep, module: Any) -> TrainStep:
        """Return a step with the negatives of its round, which are mined first if it is the round's first step.

        Args:
            step: This device's part of the step.
            module: The `RerankModule`, within a step of its trainer.

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
        """Return what a checkpoint stores: the newest round, whose negatives are in the run folder."""
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
        """Return the number of rounds that were mined, and the time that they took."""
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
            shutil.rmtree(vectors, ignore_errors=True)  # of a run that was killed in a refresh
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
            # the copies of weights in half precision that were made without a graph would cut the next step's gradient
            torch.clear_autocast_cache()
