"""Score a collection's candidates on all devices, and gather the scores on the first device as a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ranker.data.ranking import require_finite
from ranker.data.score_batches import ScoreBatch, ScoreBatches
from ranker.errors import DataError, RankerError
from ranker.types import RankBatch, Run

Result = TypeVar("Result")
WORTH_A_WORKER = 16  # the start of a worker process takes as long as collating this many batches


@dataclass(frozen=True)
class Devices:
    """This process's device, and the number of this process among all processes (one process per device).

    Args:
        device: The device of this process.
        rank: The number of this process, from 0.
        world_size: Number of processes.
        autocast: Returns a context manager that sets the precision of a forward pass.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    @classmethod
    def of_trainer(cls, trainer: Any) -> Devices:
        """The devices of a Lightning Trainer that has started its processes."""
        context = trainer.precision_plugin.forward_context
        return cls(trainer.strategy.root_device, trainer.global_rank, trainer.world_size, context)

    @classmethod
    def of_fabric(cls, fabric: Any) -> Devices:
        """The devices of a launched Lightning Fabric."""
        return cls(fabric.device, fabric.global_rank, fabric.world_size, fabric.autocast)

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes and prints."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value on every process; all processes must call this method."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def on_first(self, compute: Callable[[], Result]) -> Result | None:
        """Compute on the first process; return the result there, None elsewhere. All processes must call this method.

        Raises:
            RankerError: `compute` raised this error. All processes raise an error, but only the first process's error
                has a text, so that the text is printed once.
        """
        result, error = None, None
        if self.is_first:
            try:
                result = compute()
            except RankerError as caught:
                error = caught
        if self.broadcast(error is not None):
            raise error or RankerError("")
        return result


class ScoreCollector:
    """Collect this device's scores batch by batch, then gather the scores of all devices."""

    def __init__(self) -> None:
        self._scored: list[tuple[Tensor, Tensor]] = []  # slots and scores of each batch

    def add(self, batch: ScoreBatch, scores: Tensor) -> None:
        """Keep a batch's scores [batch, docs] on the device, without waiting for the GPU."""
        # Padding cells get slot -1, and so do all docs of a placeholder batch, which a device without a real batch
        # scores (`ScoreBatches.stand_in`). `_gather` removes these cells, because a removal here would synchronise the
        # GPU at every batch.
        slots = torch.full(scores.shape, -1, dtype=batch.slots.dtype, device=scores.device)
        slots = slots.masked_scatter(batch.batch.doc_mask, batch.slots)
        self._scored.append((slots.flatten(), scores.flatten().float()))

    def clear(self) -> None:
        """Forget all scores."""
        self._scored.clear()

    def run(self, batches: ScoreBatches, devices: Devices) -> Run | None:
        """Gather the scores of all devices; return the run on the first device and None elsewhere.

        All processes must call this method. Processes send slots and scores, no ids.

        Raises:
            DataError: A candidate has no score, or a score is not finite within float32.
        """
        slots, scores = self._gather(devices)
        return devices.on_first(lambda: _to_run(batches, slots, scores))

    def _gather(self, devices: Devices) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots, int64 [docs], and scores, float32 [docs], of all devices."""
        no_slots = torch.zeros(0, dtype=torch.int64, device=devices.device)
        scored = self._scored or [(no_slots, torch.zeros(0, device=devices.device))]
        slots, scores = (torch.cat(parts) for parts in zip(*scored, strict=True))
        slots, scores = slots[slots >= 0], scores[slots >= 0]
        self.clear()
        if devices.world_size > 1:
            counts = [torch.zeros(1, dtype=torch.int64, device=devices.device) for _ in range(devices.world_size)]
            dist.all_gather(counts, torch.tensor([len(slots)], device=devices.device))
            largest = max(int(count) for count in counts)
            slots, scores = (
                _all_gather(nn.functional.pad(part, (0, largest - len(part))), counts) for part in (slots, scores)
            )
        return slots.cpu().numpy(), scores.cpu().numpy()


class ScoringModule(Protocol):
    """An `nn.Module` that returns scores [batch, docs]; each `ranker.models.interface.Scorer` is one."""

    def __call__(self, batch: RankBatch) -> Tensor: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def eval(self) -> Any: ...
    def to(self, device: torch.device) -> Any: ...


def score_collection(
    scorer: ScoringModule,
    batches: ScoreBatches,
    devices: Devices,
    workers: int = 0,
    progress: str | None = None,
    inference_mode: bool = True,
) -> Run | None:
    """Score a collection's candidates on all devices; all processes must call this function.

    The scorer is moved to the device and set to evaluation mode; its former modes are restored at the end.

    Args:
        scorer: Scores [batch, docs].
        batches: This device's share of the candidates.
        devices: The devices of the run.
        workers: Number of worker processes that collate ahead; 0: this process collates.
        progress: Title of a progress bar on the first process; None shows none.
        inference_mode: Whether to compute under `torch.inference_mode`; else under `torch.no_grad`.

    Returns:
        query_id -> doc_id -> score on the first process, None on the others.

    Raises:
        DataError: A candidate has no score, or a score is not finite within float32.
    """
    collector = ScoreCollector()
    score_batches(scorer, batches, devices, collector.add, workers, progress, inference_mode)
    return collector.run(batches, devices)


def score_batches(
    scorer: ScoringModule,
    batches: Dataset[ScoreBatch],
    devices: Devices,
    collect: Callable[[ScoreBatch, Tensor], None],
    workers: int = 0,
    progress: str | None = None,
    inference_mode: bool = True,
) -> None:
    """Score batches on this process's device, in order; nothing is sent to other processes.

    Args:
        scorer: See `score_collection`.
        batches: The batches, a dataset with a length.
        devices: The devices of the run.
        collect: Gets each batch and its scores [batch, docs], both on the device.
        workers: Number of worker processes that collate ahead; no worker starts if the batches are few
            (`WORTH_A_WORKER`).
        progress: Title of a progress bar on the first process.
        inference_mode: Whether to compute under `torch.inference_mode`.
    """
    workers = workers if len(batches) >= WORTH_A_WORKER * workers else 0  # type: ignore[arg-type]
    loader: Any = DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=devices.device.type == "cuda")
    scorer.to(devices.device)
    without_gradients = torch.inference_mode if inference_mode else torch.no_grad
    with _evaluation_mode(scorer), without_gradients():
        for batch in _with_progress_bar(loader, len(loader), progress if devices.is_first else None):
            moved = batch.to(devices.device)
            with devices.autocast():
                scores = scorer(moved.batch)
            collect(moved, scores)


def _with_progress_bar(loader: Any, total: int, title: str | None) -> Any:
    """Return the loader, with a progress bar if there is a title."""
    if title is None:
        return loader
    from rich.progress import track

    return track(loader, title, total)


@contextlib.contextmanager
def _evaluation_mode(module: ScoringModule) -> Iterator[None]:
    """Set all parts of a module to evaluation mode; restore their modes afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _all_gather(padded: Tensor, counts: list[Tensor]) -> Tensor:
    """Return the concatenated values of all devices.

    `padded` [largest count] has this device's values, and `counts` has the number of values of each device.
    """
    parts = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def _to_run(batches: ScoreBatches, slots: np.ndarray, scores: np.ndarray) -> Run:
    if len(slots) != batches.num_slots:
        raise DataError(
            f"evaluation: expected {batches.num_slots} scores, got {len(slots)}; "
            "limit_val_batches and limit_test_batches must be off"
        )
    # float32, so that measures are computed from exactly the written values
    values = np.full(batches.num_slots, np.nan, dtype=np.float32)
    values[slots] = scores
    run = batches.run(values)
    require_finite(run)
    return run
