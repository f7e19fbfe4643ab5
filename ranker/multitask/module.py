"""Training of a ranker with auxiliary heads: one encoder pass a micro-batch, one optimizer step over all tasks, on any devices and memory."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranker.data.sampling import mix
from ranker.errors import ConfigError
from ranker.multitask.gradient_surgery import combine, cosine
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import RANKING, TaskWeighting
from ranker.multitask.steps import TaskBatch, TaskStep
from ranker.multitask.task_weights import TaskWeights
from ranker.training.rerank_module import RerankModule
from ranker.types import TrainStep

log = logging.getLogger(__name__)


class MultitaskModule(RerankModule):
    """Train ranking and its auxiliary heads by one optimizer step per `TaskStep`; only ranking is validated, so only it decides.

    A task's loss is the mean over its targets in the whole step (ranking's over its groups), whatever micro-batches and
    devices hold them. Gradients are summed over micro-batches here and over devices in one reduction of this module's
    own: which parameters have a gradient depends on the step, and what no task of a step reaches is not touched by it.

    Args:
        weighting: What the tasks' losses and gradients count.
        options: As RerankModule; the scorer is a Multitask.
        named: As RerankModule.
    """

    def __init__(self, *options: Any, weighting: TaskWeighting, **named: Any) -> None:
        super().__init__(*options, **named)
        # a compiled layer would free what the next task's backward needs, and then refuse it
        torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]
        scorer: Any = self.scorer
        assert isinstance(scorer, Multitask)
        heads = scorer.task_heads()
        self.weighting = weighting
        self.tasks = [RANKING, *scorer.heads]
        self.weights = TaskWeights(
            weighting,
            [1.0, *(head.asked.weight for head in heads)],
            [2, *(2 if head.regression else head.num_outputs for head in heads)],
            [False, *(head.regression for head in heads)],
        )
        self.register_buffer("rows_seen", torch.zeros(len(self.tasks), dtype=torch.int64))
        self.register_buffer("rows_before", torch.zeros(len(self.tasks), dtype=torch.int64))  # this epoch
        self.rows_seen: Tensor
        self.rows_before: Tensor
        self._found: tuple[Tensor, Tensor | None] | None = (
            None  # a step's losses and gradient norms, until it is judged
        )
        self._trunk = _last_shared_layer(scorer)
        if weighting.mode == "gradnorm" and not any(
            self._trunk.search(name) for name, p in self.named_parameters() if p.requires_grad
        ):
            raise ConfigError(
                "model.weighting.mode: expected trained parameters in the last layer that all tasks share for gradnorm, got none by "
                f"{self._trunk.pattern} in {type(scorer.encoder.model).__name__}; take another mode, as uncertainty"
            )

    def accumulate(self, step: TrainStep) -> Tensor:
        """Gradients of the step into the parameters; returns the step's loss on the first device and 0 on the others, float64."""
        assert isinstance(step, TaskStep)
        look = self._look(step)
        apart = look or self.weighting.surgery != "none" or self.weighting.mode == "gradnorm"
        gradients = Gradients(self, len(self.tasks) if apart else 1)
        coefficients = self.weights.coefficients(step.rows)
        losses = torch.zeros(len(self.tasks), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(step.micro_batches):
            assert isinstance(batch, TaskBatch)
            self._seed_dropout(step, i)
            parts = self.task_losses(batch)
            for task, part in parts.items():
                losses[task] += part.detach()
            if apart:
                for place, (task, part) in enumerate(parts.items()):
                    gradients.add(part, task, keep_graph=place < len(parts) - 1)
            else:
                gradients.add(
                    torch.stack([coefficients[task].to(part.dtype) * part for task, part in parts.items()]).sum(), 0
                )
        gradients.sum_over_devices()
        if dist.is_initialized():
            dist.all_reduce(losses)
        total = self.weights.total(losses, step.rows)
        self._log_tasks(step, losses, gradients if look else None)
        if apart:
            seed = int(mix(self.seed, step.epoch, step.index, 13)) % 2**63
            gradients.assign(coefficients, self.weighting.surgery, seed)
        else:
            gradients.assign(torch.ones(1, device=self.device), "none")
        self._found = losses, gradients.norms(self._trunk) if self.weighting.mode == "gradnorm" else None
        return (
            total.double() if self.trainer.is_global_zero else torch.zeros((), dtype=torch.float64, device=self.device)
        )

    def learn(self, step: TrainStep, finite: Tensor) -> None:
        """Count the step's rows and move learned weights if the step was `finite`, bool []; the device decides, the host does not wait."""
        assert isinstance(step, TaskStep) and self._found is not None
        (losses, norms), self._found = self._found, None
        self.rows_seen += torch.stack([finite * count for count in step.rows])
        for task, name in enumerate(self.tasks):
            self.log(f"rows/{name}", self.rows_seen[task].float())
        self.weights.learn(losses, step.rows, norms, finite)

    def on_train_epoch_end(self) -> None:
        """Name the tasks that no step of the epoch taught (PC-55)."""
        idle = [
            name
            for name, some in zip(self.tasks, (self.rows_seen > self.rows_before).tolist(), strict=True)
            if not some
        ]
        self.rows_before.copy_(self.rows_seen)
        if idle and self.trainer.is_global_zero:
            log.warning(
                "epoch %d: expected rows of every task, got none of %s, so that its head learned nothing; raise its share in model.sampling",
                self.current_epoch,
                ", ".join(idle),
            )

    def task_losses(self, batch: TaskBatch) -> dict[int, Tensor]:
        """This micro-batch's part of each task's loss; the parts of a step add up to it."""
        scorer: Any = self.scorer
        scores, outputs = scorer.outputs(batch)
        parts = {}
        if scores is not None:
            assert self.loss is not None
            parts[0] = self.loss(scores, batch.labels, batch.doc_mask) * batch.share
        for own, made in zip(batch.heads, outputs, strict=True):
            parts[1 + own.task] = scorer.task_heads()[own.task].loss(made, own)
        return parts

    def _look(self, step: TaskStep) -> bool:
        """Whether gradients are compared at this step, which is one of those that are logged and has ranking's rows and others."""
        every = self.weighting.cosine_every * self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.trainer.global_step + 1) % every == 0 and step.rows[0] > 0 and any(step.rows[1:])

    def _log_tasks(self, step: TaskStep, losses: Tensor, gradients: Gradients | None) -> None:
        if self.weighting.mode in ("uncertainty", "gradnorm"):
            for name, value in zip(self.tasks, self.weights.coefficients([1] * len(self.tasks)), strict=True):
                self.log(f"weight/{name}", value.float())
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (self.trainer.global_step + 1) % every:
            return
        # straight to the loggers: `log` would repeat the last value at steps that have none
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


class Gradients:
    """Gradients of one step by a module's parameters, those of several tasks side by side.

    Args:
        module: Parameters of its `scorer.encoder` are shared, the others belong to a task each.
        num_tasks: Rows to keep.
    """

    def __init__(self, module: nn.Module, num_tasks: int) -> None:
        own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        shared = [item for item in own if item[0].startswith("scorer.encoder.")]
        self.names, self.parameters = zip(
            *shared, *(item for item in own if not item[0].startswith("scorer.encoder.")), strict=True
        )
        self.sizes = [p.numel() for p in self.parameters]
        self.num_shared = sum(p.numel() for _, p in shared)
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self.values = torch.zeros(num_tasks, sum(self.sizes), dtype=dtype, device=self.parameters[0].device)
        self.reached = torch.zeros(
            num_tasks, len(self.sizes), dtype=torch.bool
        )  # on the host, which knows and has to know

    def add(self, loss: Tensor, task: int, keep_graph: bool = False) -> None:
        """Add a loss's gradient to a task's."""
        found = torch.autograd.grad(loss, self.parameters, retain_graph=keep_graph, allow_unused=True)
        for place, (view, gradient) in enumerate(zip(self.values[task].split(self.sizes), found, strict=True)):
            if gradient is not None:
                view += gradient.flatten()
                self.reached[task, place] = True

    def sum_over_devices(self) -> None:
        """Add up what all devices have."""
        if dist.is_initialized():
            dist.all_reduce(self.values)
            reached = self.reached.to(self.values)
            dist.all_reduce(reached)
            self.reached = reached.cpu() > 0

    def reach(self, task: int) -> Tensor:
        """Where a task has a gradient among the shared parameters, bool [shared]."""
        reached, sizes = (values.to(self.values.device) for values in (self.reached[task], torch.tensor(self.sizes)))
        return reached.repeat_interleave(sizes, output_size=self.values.shape[1])[: self.num_shared]

    def cosine(self, task: int) -> Tensor:
        """Cosine of ranking's and a task's gradient, over the shared parameters that the task reaches."""
        shared = self.values[:, : self.num_shared]
        return cosine(shared[0], shared[task], self.reach(task))

    def norms(self, trunk: re.Pattern[str]) -> Tensor:
        """Norm of each task's gradient by the parameters that a pattern names [tasks]."""
        views = [
            view
            for name, view in zip(self.names, self.values.split(self.sizes, dim=1), strict=True)
            if trunk.search(name)
        ]
        return torch.cat(views, dim=1).norm(dim=1)

    def assign(self, coefficients: Tensor, surgery: str, seed: int = 0) -> None:
        """Put the weighted sum into the parameters' `grad`; surgery is done on the shared ones.

        None where no task has a gradient.
        """
        weights = coefficients.to(self.values)
        if surgery == "none":
            total = weights @ self.values
        else:
            shared = self.values[:, : self.num_shared] * weights.unsqueeze(1)
            reach = torch.stack([self.reach(task) for task in range(len(weights))])
            total = torch.cat([combine(shared, reach, surgery, seed), weights @ self.values[:, self.num_shared :]])
        reached = self.reached.any(0).tolist()
        for parameter, view, known in zip(self.parameters, total.split(self.sizes), reached, strict=True):
            parameter.grad = view.view_as(parameter).to(parameter.dtype) if known else None


def _last_shared_layer(scorer: Multitask) -> re.Pattern[str]:
    """Names of the parameters of the last layer that every task reaches; without such a layer, of all that is in none."""
    layer = min([scorer.encoder.num_layers, *(head.deepest for head in scorer.task_heads())])
    return re.compile(
        rf"^scorer\.encoder\..*\blayers?\.{layer - 1}\." if layer else r"^scorer\.encoder\.(?!.*\blayers?\.\d)"
    )
