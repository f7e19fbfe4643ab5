"""The training and evaluation of a reranker under Lightning: the same optimisation on any number of devices and any memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranker.data.dataset import ScoreBatch, ScoreBatches
from ranker.data.ranking import require_finite
from ranker.encoders.encoder import Encoder
from ranker.errors import DataError, NonFinite, RankerError
from ranker.evaluation.metrics import evaluate, parse_measures, with_relevance
from ranker.hashing import mix
from ranker.training.nonfinite import Unjudged, write_dump
from ranker.types import Loss, RankBatch, Run, TrainStep

log = logging.getLogger(__name__)

Scores = tuple[np.ndarray, np.ndarray]  # slots and their scores
Evaluated = Callable[[str, Run], dict[str, float]]  # what to do with a finished run of a set; gives its measures


class RerankModule(pl.LightningModule):
    """Train a scorer by one optimizer step per `TrainStep`, and evaluate it by one run per set.

    A micro-batch's loss is the mean over its groups, weighted by its share of the step's groups; gradients are summed
    over micro-batches and devices, so devices and memory change nothing but rounding.

    Args:
        scorer: Scores [batch, docs].
        measures: ir-measures names, computed on every validation.
        loss: Scalar of scores, labels, mask; a mean over groups. None for a module that only evaluates, like the next
            two.
        optimizer: Makes the optimizer of parameter groups.
        schedule: Learning rate factor by (step from 1, total steps).
        total_steps: Optimizer steps of the whole training; None asks Lightning, which then can't resume in the middle
            of an epoch (it loads the data for the answer, and forgets to give the loader its state).
        weight_decay: Decay of matrices; biases and norms have none.
        max_norm: Gradient norm is clipped to this; None, 0 and less clip nothing, as in Lightning.
        seed: Seeds each step's dropout, so that a resumed run repeats it.
        nonfinite: What to do with a step whose loss or gradient is not finite: `stop`, or `skip` (no weight and no
            moment changes, the step counts).
        dumps: Where such steps are written, so that ranker/commands/replay.py can repeat them; None writes none.
        on_evaluated: Called on the first device with a test set's name and run; gives the measures to log.
    """

    def __init__(
        self,
        scorer: nn.Module,
        measures: list[str],
        loss: Loss | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        schedule: Callable[[int, int], float] | None = None,
        total_steps: int | None = None,
        weight_decay: float = 0.01,
        max_norm: float | None = 1.0,
        seed: int = 0,
        on_evaluated: Evaluated | None = None,
        nonfinite: str = "stop",
        dumps: Path | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scorer, self.loss = scorer, loss
        self._optimizer, self._schedule, self._total_steps = optimizer, schedule, total_steps
        self.measures, self.weight_decay, self.max_norm, self.seed = measures, weight_decay, max_norm, seed
        self.on_evaluated = on_evaluated
        self.nonfinite, self.dumps, self.skipped_steps = nonfinite, dumps, 0
        self._unjudged: Unjudged | None = None
        self.stop_asked = self.stop_agreed = (
            False  # by a signal to this device's process; by all devices, in a step that is judged
        )
        self.shown: dict[str, float] = {}  # in the progress bar, see there
        self._scored: dict[int, list[tuple[Tensor, Tensor]]] = {}  # slots and scores, by loader

    # training
    # ---------------------------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """AdamW (or what the config names) with decay groups, and a schedule over optimizer steps."""
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        assert self._optimizer is not None and self._schedule is not None
        optimizer = self._optimizer([group for group in groups if group["params"]])
        total = self._total_steps or int(self.trainer.estimated_stepping_batches)
        schedule = self._schedule
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: schedule(done + 1, total))]

    def training_step(self, step: TrainStep, step_idx: int) -> None:
        """One optimizer step: all micro-batches of this device, one gradient sync, clip, step."""
        total = self.accumulate(step)
        norm = self._clip()
        # the devices' losses sum up to the step's; their gradients and so their norms are equal, yet all must come to
        # the same decision, also to stop when one was asked to
        asked = torch.full_like(total, float(self.stop_asked))
        seen = torch.stack([total, norm.double() / self.trainer.world_size, asked])
        if dist.is_initialized():
            dist.all_reduce(seen)
        total, norm = seen[0], seen[1]
        optimizer: Any = self.optimizers()
        self._judge()
        self._unjudged = Unjudged(step, self.trainer.global_step, seen)
        finite = seen.isfinite().all()
        if optimizer.param_groups[0].get("fused"):  # a checkpoint's own choice, on whatever hardware
            # its kernel leaves weights and moments alone where this says so; the host, which must not wait for a GPU,
            # judges a step later
            optimizer.optimizer.found_inf = (~finite).float()
        elif not self._judge():
            optimizer.zero_grad()  # without gradients the optimizer's step touches nothing
        self.learn(step, finite)
        optimizer.step()
        optimizer.zero_grad()
        schedulers: Any = self.lr_schedulers()
        self.log("optim/lr", self._on_device(optimizer.param_groups[0]["lr"]))
        schedulers.step()
        self.log("train/loss", total.float())
        self.log("train/grad_norm", norm.float())
        if self.nonfinite == "skip":
            self.log("train/skipped_steps", self._on_device(self.skipped_steps))

    def _on_device(self, value: float) -> Tensor:
        """What is logged as a plain number is copied to the GPU, for which the host waits; filling a tensor there makes nothing wait."""
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def on_train_start(self) -> None:
        """Set the learning rate of the next step: that in a checkpoint is of the run that wrote it, whose end may have been another."""
        scheduler: Any = self.lr_schedulers()
        if self.trainer.is_global_zero and not any(scheduler.base_lrs):
            log.warning("optim.lr: 0, so that the training changes no weight")
        groups = scheduler.optimizer.param_groups
        stored = [float(group["lr"]) for group in groups]
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
        if self.trainer.is_global_zero and any(
            float(group["lr"]) != before for group, before in zip(groups, stored, strict=True)
        ):
            log.warning(
                "training: the learning rate of step %d is %g, where the checkpoint has %g: the schedule or the number of steps is another "
                "than that of the run that is resumed",
                scheduler.last_epoch + 1,
                groups[0]["lr"],
                stored[0],
            )

    def on_train_end(self) -> None:
        """Judge the last step; from here on dropout is random again."""
        self._judge()
        for encoder in self._encoders:
            encoder.end_training()

    def on_validation_start(self) -> None:
        """Judge the last step before its weights are measured."""
        self._judge()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what is counted, once the last step is judged: a training that has to stop writes no further checkpoint."""
        self._judge()
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped_steps = checkpoint.get("skipped_steps", 0)

    def accumulate(self, step: TrainStep) -> Tensor:
        """Backward over this device's micro-batches; returns its part of the step's loss, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if not step.micro_batches:  # every device must take part in the reduction
            self.manual_backward(self._nothing())
        for i, batch in enumerate(step.micro_batches):
            self._seed_dropout(step, i)
            with self._gradient_sync(only_if=i == len(step.micro_batches) - 1):
                loss = self.micro_batch_loss(batch) * batch.share
                self.manual_backward(loss * self.trainer.world_size)  # DDP divides by the number of devices
            total += loss.detach()
        return total

    def learn(self, step: TrainStep, finite: Tensor) -> None:
        """Change what is kept beside the optimizer's parameters, which is nothing here; not if the step was not `finite`, bool []."""

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Mean loss over the micro-batch's groups."""
        assert self.loss is not None
        return self.loss(self.scorer(batch), batch.labels, batch.doc_mask)

    def _nothing(self) -> Tensor:
        """A loss that reaches every parameter with gradient 0."""
        return torch.stack([p.view(-1)[0] * 0.0 for p in self.parameters() if p.requires_grad]).sum()

    def _seed_dropout(self, step: TrainStep, micro_batch: int) -> None:
        """Each micro-batch's randomness depends on where it stands, so that resuming needs no saved random state.

        Encoders without padding hash where each number stands in the step, so that their dropout does not hang on the
        cut into micro-batches either; what else draws (heads, padded encoders) does.
        """
        seed = step.seeds[micro_batch] if step.seeds else self.micro_batch_seed(step, micro_batch)
        torch.default_generator.manual_seed(seed)
        if self.device.type in ("cuda", "mps"):  # torch.manual_seed would look for all other kinds of devices, too
            getattr(torch, self.device.type).manual_seed(seed)
        for encoder in self._encoders:
            encoder.dropout_seed = int(mix(self.seed, step.epoch, step.index))

    @cached_property  # as the next: looking through all modules in each step is time that small steps have not got
    def _own_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @cached_property
    def _encoders(self) -> list[Encoder]:
        return [module for module in self.scorer.modules() if isinstance(module, Encoder)]

    def micro_batch_seed(self, step: TrainStep, micro_batch: int) -> int:
        """What seeds torch for this device's micro-batch."""
        return int(mix(self.seed, step.epoch, step.index, micro_batch, self.global_rank)) % 2**63

    def _gradient_sync(self, only_if: bool) -> contextlib.AbstractContextManager[Any]:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)  # missing on a single device
        return contextlib.nullcontext() if only_if or block is None else block()

    def _clip(self) -> Tensor:
        parameters = [p for p in self._own_parameters if p.grad is not None]
        clips = self.max_norm is not None and self.max_norm > 0
        return nn.utils.clip_grad_norm_(parameters, self.max_norm if clips else torch.inf)  # type: ignore[arg-type]

    def _judge(self) -> bool:
        """Whether the step that is not judged yet, if there is one, was finite; else it is reported."""
        judged, self._unjudged = self._unjudged, None
        if judged is None:
            return True
        seen = judged.wait()
        self.stop_agreed = bool(seen[2])
        self.shown["train/loss"] = float(seen[0])
        if self._is_finite(seen):
            return True
        self._report(judged.step, judged.number, *seen[:2].tolist())
        return False

    def _is_finite(self, seen: Tensor) -> bool:
        """Whether loss and gradient norm, on the host, are."""
        return bool(torch.isfinite(seen).all())

    def _report(self, step: TrainStep, number: int, loss: float, norm: float) -> None:
        """Write the step down; then count it, or end the training."""
        loader: Any = self.trainer.train_dataloader
        ids = loader.query_ids(step.epoch, step.index) if hasattr(loader, "query_ids") else []
        where = write_dump(self, step, number, loss, norm, ids) if self.dumps is not None else None
        text = (
            f"training: expected a finite loss and gradient, got loss {loss} and gradient norm {norm} at step {number} "
            f"(epoch {step.epoch}, its step {step.index}) of queries {', '.join(ids[:8])}{' ...' if len(ids) > 8 else ''}"
            + (f"; python -m ranker.commands.replay {where} repeats it" if where is not None else "")
        )
        if self.nonfinite != "skip":
            said = f"{text}; lower optim.lr, look at these queries, or set nonfinite=skip"
            raise NonFinite(said if self.trainer.is_global_zero else "", loss, norm)
        self.skipped_steps += 1
        if self.trainer.is_global_zero:
            log.warning("%s; skipped", text)

    # evaluation
    # -------------------------------------------------------------------------------------------------------------------

    def _score(self, batch: ScoreBatch, loader: int = 0) -> None:
        scores = self.scorer(batch.batch)
        # padding goes to the same slot as stand-ins; picking the real scores here would wait for the device at each
        # batch
        slots = torch.full(scores.shape, -1, dtype=batch.slots.dtype, device=scores.device).masked_scatter(
            batch.batch.doc_mask, batch.slots
        )
        self._scored.setdefault(loader, []).append((slots.flatten(), scores.flatten().float()))

    def validation_step(self, batch: ScoreBatch, batch_idx: int) -> None:
        """Score a batch of candidates."""
        self._score(batch)

    def on_validation_epoch_end(self) -> None:
        """Measure the gathered run; every device logs the same values."""
        if self.trainer.sanity_checking:
            self._scored.clear()
            return
        collection = self.trainer.datamodule.splits.val  # type: ignore[attr-defined]
        batches: ScoreBatches = self.trainer.val_dataloaders.dataset  # type: ignore[union-attr]
        scores = self._gather_scores()
        values = self._on_first_device(
            lambda: evaluate(_run_of(batches, scores), collection.qrels, self.measures, collection.relevance).means
        )
        for name, value in values.items():
            self.log(f"val/{name}", value, prog_bar=name == next(iter(values)), sync_dist=False)
        # a collection's relevance is part of a measure's name, AP(rel=2); `monitor` knows it by the name that was asked
        # for
        for asked in parse_measures(self.measures):
            (measured,) = with_relevance([asked], collection.relevance)
            if str(asked) not in values:
                self.log(f"val/{asked}", values[str(measured)], sync_dist=False)

    def test_step(self, batch: ScoreBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of candidates of the set that is being tested."""
        self._score(batch, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Gather, measure and hand over one run per test set."""
        loaders: Any = self.trainer.test_dataloaders
        for i, name in enumerate(self.trainer.datamodule.splits.tests):  # type: ignore[attr-defined]
            batches: ScoreBatches = loaders[i].dataset
            scores = self._gather_scores(i)
            for measure_name, value in self._on_first_device(partial(self._hand_over, name, batches, scores)).items():
                self.log(f"test/{name}/{measure_name}", value, sync_dist=False)

    def _hand_over(self, name: str, batches: ScoreBatches, scores: Scores) -> dict[str, float]:
        assert self.on_evaluated is not None
        return self.on_evaluated(name, _run_of(batches, scores))

    def _gather_scores(self, loader: int = 0) -> Scores:
        """The slots and scores of all devices, on the first one; only numbers travel."""
        scored = self._scored.pop(loader, None) or [
            (torch.zeros(0, dtype=torch.int64, device=self.device), torch.zeros(0, device=self.device))
        ]
        slots, scores = (torch.cat(parts) for parts in zip(*scored, strict=True))
        slots, scores = slots[slots >= 0], scores[slots >= 0]
        if self.trainer.world_size > 1:
            counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.trainer.world_size)]
            dist.all_gather(counts, torch.tensor([len(slots)], device=self.device))
            most = max(int(count) for count in counts)
            slots, scores = (
                _gather(nn.functional.pad(part, (0, most - len(part))), counts) for part in (slots, scores)
            )
        return slots.cpu().numpy(), scores.cpu().numpy()

    def _on_first_device(self, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Compute on the first device and give every device the result, or the error."""
        outcome: Any = None
        if self.trainer.is_global_zero:
            try:
                outcome = compute()
            except RankerError as error:
                outcome = error
        if self.trainer.world_size > 1:
            outcome = self.trainer.strategy.broadcast(outcome, src=0)
        if isinstance(outcome, Exception):
            raise outcome if self.trainer.is_global_zero else RankerError("")  # said once
        return outcome


def _gather(padded: Tensor, counts: list[Tensor]) -> Tensor:
    parts = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def _run_of(batches: ScoreBatches, scored: Scores) -> Run:
    slots, scores = scored
    if len(slots) != batches.num_slots:
        raise DataError(
            f"evaluation: expected {batches.num_slots} scores, got {len(slots)}; limit_val_batches and limit_test_batches must be off"
        )
    # float64 scores of tests aside, a score is float32: what is written equals what is measured
    values = np.full(batches.num_slots, np.nan, dtype=np.float32)
    values[slots] = scores
    run = batches.run(values)
    require_finite(run)
    return run
