"""Train a ranker with auxiliary heads, in one encoder pass per micro-batch and one optimizer step over all tasks."""

from __future__ import annotations

import logging
import re

import torch
import torch.distributed as dist
from torch import Tensor

from ranker.errors import ConfigError
from ranker.hashing import mix
from ranker.multitask.gradients import Gradients
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import RANKING, TaskWeighting
from ranker.multitask.steps import TaskBatch, TaskStep
from ranker.multitask.task_weights import TaskWeights
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.rerank_module import RerankModule
from ranker.types import Loss, TrainStep

log = logging.getLogger(__name__)


class MultitaskModule(RerankModule):
    """Trains ranking and auxiliary heads, with one optimizer step per `TaskStep`.

    Only ranking is validated, so ranking alone decides which checkpoint is best.

    The loss of a task is the mean over its targets in the whole step, and the loss of ranking the mean over its groups,
    for any split into micro-batches and devices. The module sums gradients over micro-batches, and over devices in one
    reduction. DDP's reduction is not used, because the set of parameters with a gradient depends on the step. A step
    does not change parameters that no task of the step reaches.

    Args:
        scorer: See `RerankModule`.
        measures: See `RerankModule`.
        loss: The loss of ranking, see `RerankModule`.
        optimization: See `RerankModule`.
        nonfinite: See `RerankModule`.
        weighting: How losses and gradients of the tasks are weighted.
    """

    scorer: Multitask

    def __init__(
        self,
        scorer: Multitask,
        measures: list[str],
        loss: Loss | None = None,
        optimization: Optimization | None = None,
        nonfinite: NonFiniteOptions | None = None,
        *,
        weighting: TaskWeighting,
    ) -> None:
        super().__init__(scorer, measures, loss, optimization, nonfinite)
        # With donated buffers, a compiled layer's backward pass would free buffers that the next task's pass needs
        torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]
        heads = scorer.task_heads()
        self.weighting = weighting
        self.tasks = [RANKING, *scorer.heads]
        self.weights = TaskWeights(
            weighting,
            [1.0, *(head.spec.weight for head in heads)],
            [2, *(2 if head.regression else head.num_outputs for head in heads)],
            [False, *(head.regression for head in heads)],
        )
        self.register_buffer("rows_seen", torch.zeros(len(self.tasks), dtype=torch.int64))
        self.register_buffer("rows_before", torch.zeros(len(self.tasks), dtype=torch.int64))  # rows before this epoch
        self.rows_seen: Tensor
        self.rows_before: Tensor
        # Losses and gradient norms of a step, until the check whether its gradients are finite
        self._step_losses: tuple[Tensor, Tensor | None] | None = None
        self._shared_layer = _last_shared_layer(scorer)
        if weighting.mode == "gradnorm" and not any(
            self._shared_layer.search(name) for name, p in self.named_parameters() if p.requires_grad
        ):
            raise ConfigError(
                "model.weighting.mode: expected trained parameters in the last layer that all tasks share for "
                f"gradnorm, got none that match {self._shared_layer.pattern} in {type(scorer.encoder.model).__name__}; "
                "take another mode, such as uncertainty"
            )

    def accumulate(self, step: TrainStep) -> Tensor:
        """Write the gradients of a step into the parameters.

        Returns:
            The step's loss on the first device and 0 on the others, a float64 scalar.
        """
        assert isinstance(step, TaskStep)
        compare = self._compares_gradients(step)
        per_task = compare or self.weighting.surgery != "none" or self.weighting.mode == "gradnorm"
        gradients = Gradients(self, len(self.tasks) if per_task else 1)
        coefficients = self.weights.coefficients(step.rows)
        losses = torch.zeros(len(self.tasks), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(step.micro_batches):
            assert isinstance(batch, TaskBatch)
            self._seed_dropout(step, i)
            batch_losses = self.task_losses(batch)
            for task, loss in batch_losses.items():
                losses[task] += loss.detach()
            if per_task:
                for number, (task, loss) in enumerate(batch_losses.items()):
                    gradients.add(loss, task, keep_graph=number < len(batch_losses) - 1)
            else:
                gradients.add(
                    torch.stack(
                        [coefficients[task].to(loss.dtype) * loss for task, loss in batch_losses.items()]
                    ).sum(),
                    0,
                )
        gradients.sum_over_devices()
        if dist.is_initialized():
            dist.all_reduce(losses)
        total = self.weights.total(losses, step.rows)
        self._log_tasks(step, losses, gradients if compare else None)
        if per_task:
            seed = int(mix(self.seed, step.epoch, step.index, 13)) % 2**63
            gradients.assign(coefficients, self.weighting.surgery, seed)
        else:
            gradients.assign(torch.ones(1, device=self.device), "none")
        self._step_losses = losses, gradients.norms(self._shared_layer) if self.weighting.mode == "gradnorm" else None
        return (
            total.double() if self.trainer.is_global_zero else torch.zeros((), dtype=torch.float64, device=self.device)
        )

    def update_other_state(self, step: TrainStep, finite: Tensor) -> None:
        """If `finite` (a bool scalar), count the step's rows and update learned weights; the host does not wait."""
        assert isinstance(step, TaskStep) and self._step_losses is not None
        (losses, norms), self._step_losses = self._step_losses, None
        self.rows_seen += torch.stack([finite * count for count in step.rows])
        for task, name in enumerate(self.tasks):
            self.log(f"rows/{name}", self.rows_seen[task].float())
        self.weights.update(losses, step.rows, norms, finite)

    def on_train_epoch_end(self) -> None:
        """Warn of tasks that had no rows in the epoch (PC-55)."""
        trained = (self.rows_seen > self.rows_before).tolist()
        idle = [name for name, has_rows in zip(self.tasks, trained, strict=True) if not has_rows]
        self.rows_before.copy_(self.rows_seen)
        if idle and self.trainer.is_global_zero:
            log.warning(
                "epoch %d: expected rows of every task, got none of %s, so that its head learned nothing; raise its "
                "share in model.sampling",
                self.current_epoch,
                ", ".join(idle),
            )

    def task_losses(self, batch: TaskBatch) -> dict[int, Tensor]:
        """Return task number -> this micro-batch's part of the task's loss; the parts of a step sum to its loss."""
        scores, outputs = self.scorer.outputs(batch)
        losses = {}
        if scores is not None:
            assert self.loss is not None
            losses[0] = self.loss(scores, batch.labels, batch.doc_mask) * batch.share
        for head_batch, head_outputs in zip(batch.heads, outputs, strict=True):
            losses[1 + head_batch.task] = self.scorer.task_heads()[head_batch.task].loss(head_outputs, head_batch)
        return losses

    def _compares_gradients(self, step: TaskStep) -> bool:
        """Return whether this step logs gradient cosines, for which it needs rows of ranking and of another task."""
        every = self.weighting.cosine_every * self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.trainer.global_step + 1) % every == 0 and step.rows[0] > 0 and any(step.rows[1:])

    def _log_tasks(self, step: TaskStep, losses: Tensor, gradients: Gradients | None) -> None:
        if self.weighting.mode in ("uncertainty", "gradnorm"):
            for name, value in zip(self.tasks, self.weights.coefficients([1] * len(self.tasks)), strict=True):
                self.log(f"weight/{name}", value.float())
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (self.trainer.global_step + 1) % every:
            return
        # `self.log` is not used, because it would repeat a task's last value at steps without rows of the task
        values = {f"train/loss/{name}": losses[task] for task, name in enumerate(self.tasks) if step.rows[task]}
        if gradients is not None:
            values |= {
                f"cosine/{name}": gradients.cosine(task)
                for task, name in enumerate(self.tasks)
                if task and step.rows[task]
            }
        for logger in self.loggers:
            logger.log_metrics(
                {"epoch": float(self.current_epoch), **{key: float(value) for key, value in values.items()}},
                step=self.trainer.global_step,
            )


def _last_shared_layer(scorer: Multitask) -> re.Pattern[str]:
    """Return a pattern for the names of the parameters in the last layer that every task reaches.

    If a task reads only the embeddings, the pattern matches the encoder's parameters outside of all layers.
    """
    layer = min([scorer.encoder.num_layers, *(head.deepest for head in scorer.task_heads())])
    return re.compile(
        rf"^scorer\.encoder\..*\blayers?\.{layer - 1}\." if layer else r"^scorer\.encoder\.(?!.*\blayers?\.\d)"
    )
