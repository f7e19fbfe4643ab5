"""Train and validate a reranker under Lightning; the result does not depend on the number of devices or on memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ranker.encoders.encoder import Encoder
from ranker.hashing import mix
from ranker.models.interface import Scorer
from ranker.training.checkpoint_weights import add_base, leave_out_base
from ranker.training.loss_inputs import against_reference, check_reference, loss_of, reference_scores
from ranker.training.nonfinite import PendingStep, report
from ranker.training.optimizer import new_optimizer, new_scheduler, set_learning_rate
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.set_losses import SetLosses
from ranker.training.sharding import is_sharded, shard, whole_tensor
from ranker.training.validation import ValidatedModule
from ranker.types import Loss, RankBatch, TrainStep


class RerankModule(ValidatedModule):
    """Train a scorer, one optimizer step per `TrainStep`.

    A micro-batch's loss is the mean over its groups, weighted by its share of the step's groups. Gradients are summed
    over micro-batches and devices. The number of devices and the memory budget therefore change only the rounding.

    Args:
        scorer: Scores [batch, docs].
        measures: Names of measures (ir-measures), computed at every validation.
        loss: Returns a scalar for scores, labels and mask: a mean over groups. If the training mixes several sets, it
            is a `SetLosses`. None for a module that is only validated.
        optimization: Optimizer, schedule, clipping and seed.
        nonfinite: What to do at a step whose loss or gradient is NaN or infinite.
    """

    def __init__(
        self,
        scorer: Scorer,
        measures: list[str],
        loss: Loss | None = None,
        optimization: Optimization | None = None,
        nonfinite: NonFiniteOptions | None = None,
    ) -> None:
        super().__init__(scorer, measures)
        self.automatic_optimization = False
        self.loss = loss
        self.optimization = optimization or Optimization()
        self.nonfinite = nonfinite or NonFiniteOptions()
        self.seed = self.optimization.seed
        self.skipped_steps = 0
        self.shown: dict[str, float] = {}  # values that the progress bar shows
        self.stop_asked = False  # whether this process received a signal to stop
        self.stop_agreed = False  # whether all processes know that one of them received it
        self.refresh: Any = None  # mines new negatives at some steps: ranker.retrieval.refresh.RefreshedNegatives
        self._has_reference, self._step_seed = against_reference(loss), 0
        if self._has_reference:
            check_reference(scorer)  # type: ignore[arg-type]
        self._pending: PendingStep | None = None

    def configure_model(self) -> None:
        """Shard the weights over the devices if the strategy shards them. Lightning calls this before each stage."""
        strategy = self.trainer.strategy
        if is_sharded(strategy) and not isinstance(self.scorer, FSDPModule):
            half = torch.bfloat16 if str(self.trainer.precision) == "bf16-mixed" else None
            mesh: Any = strategy.device_mesh  # type: ignore[attr-defined]
            shard(self, mesh["data_parallel"], half)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with groups for weight decay, and the schedule over optimizer steps."""
        optimizer = new_optimizer(self, self.optimization)
        total = self.optimization.total_steps or int(self.trainer.estimated_stepping_batches)
        return [optimizer], [new_scheduler(optimizer, self.optimization, total)]

    def training_step(self, step: TrainStep, step_idx: int) -> None:
        """Make one optimizer step: process this device's micro-batches, sum and clip the gradients, update weights."""
        if self.refresh is not None:
            step = self.refresh.current(step, self)
        if isinstance(self.loss, SetLosses):
            self.loss.begin(step)
        total = self.accumulate(step)
        norm = self.clip()
        # One all-reduce over the devices sums these values: the loss, the gradient norm, the requests to stop, and the
        # loss of each set if there are several sets. Each device already has the whole gradient norm, so the norm is
        # first divided by the number of devices. All devices read the same sums, so they decide alike whether the step
        # is finite and whether to stop.
        stop = torch.full_like(total, float(self.stop_asked))
        of_sets = self.loss.parts(total) if isinstance(self.loss, SetLosses) else ()
        summary = torch.stack([total, norm.double() / self.trainer.world_size, stop, *of_sets])
        if dist.is_initialized():
            dist.all_reduce(summary)
        total, norm = summary[0], summary[1]
        optimizer: Any = self.optimizers()
        self._check_pending()
        self._pending = PendingStep(step, self.trainer.global_step, summary)
        finite = summary.isfinite().all()
        # Read `fused` from the optimizer and not from the configuration: a loaded checkpoint sets it to the value of
        # the run that wrote the checkpoint.
        if optimizer.param_groups[0].get("fused"):
            # The fused kernel skips the update of weights and moments if `found_inf` is set. The host must not wait
            # for a GPU, so the host checks this step during the next one.
            optimizer.optimizer.found_inf = (~finite).float()
        elif not self._check_pending():
            optimizer.zero_grad()  # without gradients the optimizer's step changes nothing
        self.update_other_state(step, finite)
        optimizer.step()
        optimizer.zero_grad()
        schedulers: Any = self.lr_schedulers()
        self.log("optim/lr", self._on_device(optimizer.param_groups[0]["lr"]))
        schedulers.step()
        self.log("train/loss", total.float())
        self.log("train/grad_norm", norm.float())
        if self.nonfinite.action == "skip":
            self.log("train/skipped_steps", self._on_device(self.skipped_steps))
        if isinstance(self.loss, SetLosses):
            for name, count, loss in self.loss.end(step, summary[3:].float()):
                self.log(f"train/groups/{name}", self._on_device(count))
                self.log(f"train/loss/{name}", loss)
        if self.device.type == "cpu":
            self._check_pending()  # on a CPU, a check at once costs no wait

    def _on_device(self, value: float) -> Tensor:
        """Return a number as a tensor on the device. Lightning's copy of a Python number would make the host wait."""
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def on_train_start(self) -> None:
        """Set the next step's learning rate from this run's schedule."""
        if self.refresh is not None:
            self.refresh.start(self)
        set_learning_rate(self.lr_schedulers(), warn=self.trainer.is_global_zero)

    def on_train_end(self) -> None:
        """Check that the last step was finite, and let the encoders draw dropout seeds at random again."""
        self._check_pending()
        for encoder in self._encoders:
            encoder.end_training()

    def on_validation_start(self) -> None:
        """Check that the last step was finite before the model is validated."""
        self._check_pending()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store counts of the training, and leave out the frozen weights to which adapters were added.

        The counts are the number of skipped steps, the number of trained groups of each set, and the number of rounds
        of mined negatives.
        The last step is checked first: if its loss or gradient is not finite and the training therefore ends
        (`NonFiniteOptions`), no checkpoint is written.
        """
        self._check_pending()
        checkpoint["skipped_steps"] = self.skipped_steps
        if self.refresh is not None:
            checkpoint["refresh"] = self.refresh.state_dict()
        if isinstance(self.loss, SetLosses):
            checkpoint["set_groups"] = self.loss.groups
        leave_out_base(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the number of skipped steps, the number of groups of each set, and the round of negatives.

        Raises:
            CheckpointError: The checkpoint's adapters were trained on other weights than those of `encoder.name`.
        """
        if any(value.dtype == torch.float64 for value in checkpoint.get("state_dict", {}).values()):
            self.double()  # Lightning would convert to float64 only after loading, and so round the loaded weights
        self.skipped_steps = checkpoint.get("skipped_steps", 0)
        if self.refresh is not None:
            self.refresh.load_state_dict(checkpoint["refresh"], self)
        if isinstance(self.loss, SetLosses) and "set_groups" in checkpoint:
            self.loss.groups = list(checkpoint["set_groups"])
        add_base(self, checkpoint)

    def accumulate(self, step: TrainStep) -> Tensor:
        """Run forward and backward over this device's micro-batches; return their part of the step's loss, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if not step.micro_batches:  # every device must take part in the all-reduce
            self.manual_backward(self.zero_loss())
        for i, batch in enumerate(step.micro_batches):
            self._seed_dropout(step, i)
            with self._gradient_sync(only_if=i == len(step.micro_batches) - 1):
                loss = self.micro_batch_loss(batch) * batch.share
                self.manual_backward(loss * self.trainer.world_size)  # DDP divides by the number of devices
            total += loss.detach()
        return total

    def update_other_state(self, step: TrainStep, finite: Tensor) -> None:
        """Update state that does not belong to the optimizer, such as loss weights. Subclasses override this method.

        Args:
            step: The step.
            finite: Whether loss and gradient of the step are finite, a bool scalar; if False, nothing may change.
        """

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the mean loss over the micro-batch's groups, a scalar tensor."""
        reference = reference_scores(self.scorer, batch) if self._has_reference else None
        return self.loss_of_scores(self.scorer(batch), batch, reference)

    def loss_of_scores(self, scores: Tensor, batch: RankBatch, reference: Tensor | None = None) -> Tensor:
        """Return the mean loss over the micro-batch's groups, a scalar tensor, from scores [batch, docs].

        See `loss_of`.
        """
        assert self.loss is not None
        if isinstance(self.loss, SetLosses):
            return self.loss.of_batch(scores, batch, reference, self._step_seed)
        return loss_of(self.loss, scores, batch, reference, self._step_seed)

    def zero_loss(self) -> Tensor:
        """Return a loss of 0 whose gradient is 0 for every trained parameter."""
        return torch.stack([p.view(-1)[0] * 0.0 for p in self.parameters() if p.requires_grad]).sum()

    def _seed_dropout(self, step: TrainStep, micro_batch: int) -> None:
        """Seed a micro-batch's dropout by its position in the training, so that a resume needs no saved random state.

        An encoder without padding computes a dropout mask from the seed and the row's position in the step, so the
        masks are the same for any split into micro-batches. Masks of scoring heads and of padded encoders depend on
        the split.
        """
        seed = step.seeds[micro_batch] if step.seeds else self.micro_batch_seed(step, micro_batch)
        torch.default_generator.manual_seed(seed)
        if self.device.type in ("cuda", "mps"):  # torch.manual_seed would also check all other device types
            getattr(torch, self.device.type).manual_seed(seed)
        self._step_seed = int(mix(self.seed, step.epoch, step.index))
        for encoder in self._encoders:
            encoder.dropout_seed = self._step_seed

    # the next two are cached, because a search through all modules takes a noticeable part of a small step's time
    @cached_property
    def _all_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @cached_property
    def _encoders(self) -> list[Encoder]:
        return [module for module in self.scorer.modules() if isinstance(module, Encoder)]

    def micro_batch_seed(self, step: TrainStep, micro_batch: int) -> int:
        """Return torch's seed for a micro-batch of this device."""
        return int(mix(self.seed, step.epoch, step.index, micro_batch, self.global_rank)) % 2**63

    def _gradient_sync(self, only_if: bool) -> contextlib.AbstractContextManager[Any]:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)  # missing on a single device
        return contextlib.nullcontext() if only_if or block is None else block()

    def clip(self) -> Tensor:
        """Clip the gradients, and return their norm before clipping."""
        return self.clip_part(self._all_parameters)

    def clip_part(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Clip the gradients of some parameters by the norm of these gradients, and return the norm before clipping."""
        parameters = [p for p in parameters if p.grad is not None]
        max_norm = self.optimization.max_norm
        norm = nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None and max_norm > 0 else torch.inf)
        whole: Tensor = whole_tensor(norm)
        return whole

    def _check_pending(self) -> bool:
        """Check whether loss and gradient of the pending step were finite, and report the step if they were not.

        Returns:
            Whether the pending step was finite, or there is none.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        summary = pending.wait()
        self.stop_agreed = bool(summary[2])
        self.shown["train/loss"] = float(summary[0])
        if self._is_finite(summary):
            return True
        report(self, pending.step, pending.number, *summary[:2].tolist())
        self.skipped_steps += 1
        return False

    def _is_finite(self, summary: Tensor) -> bool:
        """Return whether a step's loss and gradient norm (on the host) are finite."""
        return bool(torch.isfinite(summary).all())
