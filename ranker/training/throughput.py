"""Throughput of a training: pairs and tokens per second, the share of time spent waiting for data, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch

from ranker.types import TrainStep


class Throughput(pl.Callback):
    """Measure training steps, validation left out; pairs are those of all devices, tokens are this device's times their number."""

    def __init__(self) -> None:
        self.pairs = self.tokens = self.steps = 0
        self.busy_seconds = self.wait_seconds = 0.0
        self._started = self._ended = None  # type: float | None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Note how long the loop waited for this step's data."""
        now = time.perf_counter()
        if self._ended is not None:
            self.wait_seconds += now - self._ended
        self._started = now

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: TrainStep, batch_idx: int) -> None:  # noqa: ARG002
        """Count the step."""
        now = time.perf_counter()
        assert self._started is not None
        self.busy_seconds += now - self._started
        self._ended = now
        self.steps += 1
        self.pairs += batch.num_docs
        self.tokens += trainer.world_size * sum(
            texts.num_tokens for micro in batch.micro_batches for texts in (micro.pairs, micro.queries, micro.docs) if texts is not None
        )
        module.log("train/pairs_per_second", self.pairs / self.seconds, prog_bar=True)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:  # noqa: ARG002
        """What follows is not waiting for training data."""
        self._ended = None

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:  # noqa: ARG002
        """The time between epochs is not waiting either."""
        self._ended = None

    @property
    def seconds(self) -> float:
        """Time in training steps and in waiting for them."""
        return max(self.busy_seconds + self.wait_seconds, 1e-9)

    def report(self) -> dict[str, float]:
        """The figures for `result.json`."""
        return {
            "pairs_per_second": self.pairs / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "data_wait_share": self.wait_seconds / self.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "train_seconds": self.seconds,
        }


def peak_memory_bytes() -> int:
    """Peak memory of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
