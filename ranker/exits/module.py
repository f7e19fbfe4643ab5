"""Train the heads of `EarlyExit` together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.losses.mse import MSE
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.rerank_module import RerankModule
from ranker.types import Loss, RankBatch


@dataclass(frozen=True)
class ExitTraining:
    """How early heads are trained.

    Args:
        trunk: Whether gradients of early heads reach the encoder. If False, the encoder and the last head get the same
            weights as in a training without early heads.
        weight: Weight of the mean loss of the early heads; the last layer's loss has weight 1.
        distilled: Share of an early head's loss that is the squared error to the last layer's score (self-distillation,
            FastBERT, Liu et al., 2020, arXiv:2004.02178). The remaining share is the loss on the labels.

    Raises:
        ConfigError: A value is out of range.
    """

    trunk: bool = False
    weight: float = 1.0
    distilled: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise ConfigError(f"model.weight: expected a finite weight of at least 0, got {self.weight}")
        if not 0 <= self.distilled <= 1:
            raise ConfigError(f"model.distilled: expected a share from 0 to 1, got {self.distilled}")


class EarlyExitModule(RerankModule):
    """`RerankModule` that trains early heads together with the last head. Validation uses the scorer's exit rule.

    Args:
        scorer: As in RerankModule.
        measures: As in RerankModule.
        loss: As in RerankModule.
        optimization: As in RerankModule.
        nonfinite: As in RerankModule.
        options: How early heads are trained.
    """

    scorer: EarlyExit

    def __init__(
        self,
        scorer: EarlyExit,
        measures: list[str],
        loss: Loss | None = None,
        optimization: Optimization | None = None,
        nonfinite: NonFiniteOptions | None = None,
        *,
        options: ExitTraining,
    ) -> None:
        super().__init__(scorer, measures, loss, optimization, nonfinite)
        self.options = options
        self._distance = MSE()

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the last layer's loss plus `weight` times the early heads' mean loss; a scalar, a mean over groups."""
        options = self.options
        last, early = self.scorer.all_scores(batch, options.trunk)
        losses = []
        for scores in early:
            labels = self.loss_of_scores(scores, batch) if options.distilled < 1 else scores.new_zeros(())
            distance = self._distance(scores, last.detach(), batch.doc_mask)
            losses.append((1 - options.distilled) * labels + options.distilled * distance)
        return self.loss_of_scores(last, batch) + options.weight * torch.stack(losses).mean()

    @cached_property
    def _early(self) -> list[nn.Parameter]:
        return list(self.scorer.exit_heads.parameters())

    @cached_property
    def _others(self) -> list[nn.Parameter]:
        early = set(map(id, self._early))
        return [parameter for parameter in self.parameters() if id(parameter) not in early]

    def clip(self) -> Tensor:
        """Clip gradients. With `trunk=False`, those of early heads are clipped apart and don't affect the encoder."""
        if self.options.trunk:
            return super().clip()
        early = self.clip_part(self._early)
        return torch.hypot(early, self.clip_part(self._others))
