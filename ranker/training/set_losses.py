"""The losses of a mix of several sets: each group uses the loss of its set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ranker.training.loss_inputs import loss_of
from ranker.types import Loss, RankBatch, TrainStep


class SetLosses(nn.Module):
    """One loss per set of a mix.

    Each group uses the loss of its set. The loss of a batch is the mean over its groups, so a set with more groups has
    more weight.

    Args:
        losses: Set name -> loss, in the order of the sets in `RankBatch.set_sizes`.
    """

    def __init__(self, losses: Mapping[str, Loss]) -> None:
        super().__init__()
        self.names, self.losses = list(losses), list(losses.values())
        # registered as modules, so that parameters of a loss are trained and stored
        self.registered = nn.ModuleList(loss for loss in self.losses if isinstance(loss, nn.Module))
        self.groups = [0] * len(losses)  # number of groups of each set since the start of the training
        self._step: TrainStep | None = None
        self._sums: list[Tensor] = []

    def begin(self, step: TrainStep) -> None:
        """Prepare for an optimizer step."""
        self._step, self._sums = step, []

    def of_batch(self, scores: Tensor, batch: RankBatch, reference: Tensor | None = None, seed: int = 0) -> Tensor:
        """Return the mean loss of a batch's groups, a scalar.

        Args:
            scores: [batch, docs].
            batch: The batch, whose groups are in the order of the sets.
            reference: See `loss_of`.
            seed: See `loss_of`.
        """
        num_groups, start = sum(batch.set_sizes), 0
        loss: Tensor | float = self._nothing()
        for i, size in enumerate(batch.set_sizes):
            if not size:
                continue
            rows = slice(start, start + size)
            part = loss_of(self.losses[i], scores, batch, reference, seed, rows) * (size / num_groups)
            loss = part + loss
            if not self._sums:
                self._sums = [torch.zeros((), dtype=torch.float64, device=part.device) for _ in self.losses]
            self._sums[i] += part.detach() * batch.share
            start += size
        assert isinstance(loss, Tensor)
        return loss

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the loss of a step whose groups all belong to one set. All inputs are [batch, docs]."""
        return self.losses[self._only_set()](scores, labels, doc_mask) + self._nothing()

    def _only_set(self) -> int:
        assert self._step is not None
        (only,) = (i for i, count in enumerate(self._step.set_groups) if count)
        return only

    def _nothing(self) -> Tensor | float:
        """Return 0 with the gradient 0 for all losses' parameters, so each parameter has a gradient on each device."""
        return sum((parameter.sum() * 0.0 for parameter in self.parameters() if parameter.requires_grad), start=0.0)

    def parts(self, total: Tensor) -> list[Tensor]:
        """Return each set's part of this device's loss of the step, float64 scalars that sum to the scalar `total`."""
        assert self._step is not None
        groups = self._step.set_groups
        if sum(count > 0 for count in groups) == 1:
            return [total if count else torch.zeros_like(total) for count in groups]
        return self._sums or [torch.zeros_like(total) for _ in groups]

    def end(self, step: TrainStep, parts: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Add the step's number of groups of each set to the counts.

        Args:
            step: The step.
            parts: Part of each set in the step's loss on all devices [sets].

        Returns:
            For each set: its name, the number of its groups since the training began, and the mean loss of its groups
            in this step. The mean is NaN if the step has no groups of the set.
        """
        for i, (name, count) in enumerate(zip(self.names, step.set_groups, strict=True)):
            self.groups[i] += count
            yield name, self.groups[i], parts[i] * (step.num_groups / count if count else float("nan"))
