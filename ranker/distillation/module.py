"""Train a student on labels and on a teacher's hidden states, attention distributions and scores."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ranker.distillation.layer_map import layer_map
from ranker.distillation.layers import Layers
from ranker.distillation.start import check_fit, start_from_layers
from ranker.interactions.grid import to_grid
from ranker.losses._groups import mean_in_groups
from ranker.losses.mse import MSE
from ranker.models.interface import Scorer
from ranker.probing.profile import read_profile
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.rerank_module import RerankModule
from ranker.types import Loss, RankBatch, TokenBatch

log = logging.getLogger(__name__)


class _Shared(tuple[Any]):
    """A tuple that `deepcopy` does not copy: callbacks that average weights copy the module without its content."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class DistillationModule(RerankModule):
    """`RerankModule` with a teacher. The teacher's weights are not trained, and not stored in checkpoints.

    Each part of the loss is a mean over groups, and the value of a group depends on this group only. So the loss does
    not depend on how a step is split into micro-batches or over devices.

    Args:
        scorer: The student.
        measures: As in RerankModule.
        loss: Loss on the labels, as in RerankModule.
        optimization: As in RerankModule.
        nonfinite: As in RerankModule.
        teacher: The teacher.
        options: The parts of the loss and their weights.
        fresh: Whether a new student is trained, which may start from the teacher's weights.

    Raises:
        ConfigError: Student and teacher can't be compared, see `check_fit`.
    """

    def __init__(
        self,
        scorer: Scorer,
        measures: list[str],
        loss: Loss | None = None,
        optimization: Optimization | None = None,
        nonfinite: NonFiniteOptions | None = None,
        *,
        teacher: Any,
        options: Layers,
        fresh: bool = True,
    ) -> None:
        super().__init__(scorer, measures, loss, optimization, nonfinite)
        check_fit(scorer, teacher, options.attention > 0)
        self.options = options
        # the tuple keeps torch from registering the teacher as a submodule
        self._teacher = _Shared([teacher.eval().requires_grad_(False)])
        profile = None if options.layers != "auto" else read_profile(str(options.report), "distill.report")
        self.layers = layer_map(options.layers, scorer.encoder.num_layers, teacher.encoder.num_layers, profile)
        log.info("distillation: the student's layers learn from layers %s of the teacher", self.layers)
        one_width = scorer.encoder.dim == teacher.encoder.dim
        if fresh and options.start:
            copied = start_from_layers(scorer, teacher, self.layers)  # type: ignore[arg-type]
            log.info("distillation: %.1f million weights were copied from the teacher", copied / 1e6)
        self.maps = nn.ModuleList(
            nn.Identity() if one_width else nn.Linear(scorer.encoder.dim, teacher.encoder.dim, bias=False)
            for _ in range(len(self.layers) + 1 if options.states else 0)
        )
        self._score_loss = MSE()

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the weighted sum of the parts of the loss (see `Layers`), averaged over groups, a scalar."""
        assert batch.pairs is not None
        weights, student = self.options, self.scorer
        taught, taught_attention, target = self._teaching(batch)
        states, attention = _read(student, batch.pairs, weights.attention > 0)
        scores = _scores(student, states[-1], batch)
        total = weights.labels * self.loss_of_scores(scores, batch) if weights.labels else scores.sum() * 0.0
        if weights.scores:
            total = total + weights.scores * self._score_loss(scores, target, batch.doc_mask)
        if weights.states:
            distances = [
                (mapped(own).float() - other.float()).square().mean(-1)
                if own.dtype != torch.float64
                else (mapped(own) - other).square().mean(-1)
                for mapped, own, other in zip(self.maps, states, taught, strict=True)
            ]
            total = total + weights.states * _mean(torch.stack(distances).mean(0), batch)
        if weights.attention:
            gaps = [divergence(own, other) for own, other in zip(attention, taught_attention, strict=True)]
            total = total + weights.attention * _mean(torch.stack(gaps).mean(0), batch)
        return total

    @torch.no_grad()
    def _teaching(self, batch: RankBatch) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return the teacher's states and attention distributions of the chosen layers, and its scores."""
        assert batch.pairs is not None
        (teacher,) = self._teacher
        weight, own = next(teacher.parameters()), next(iter(self.scorer.parameters()))
        if (weight.device, weight.dtype) != (own.device, own.dtype):
            teacher.to(device=own.device, dtype=own.dtype)
        states, attention = _read(teacher, batch.pairs, self.options.attention > 0)
        scores = _scores(teacher, states[-1], batch)
        chosen = [states[0], *(states[layer] for layer in self.layers)]
        return chosen, [attention[layer - 1] for layer in self.layers] if attention else [], scores


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of the attention distributions of each token, averaged over heads, [tokens].

    Args:
        student: Distributions [tokens, heads, keys]; masked keys have probability 0 in both.
        teacher: Distributions of the same shape.
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    least = torch.finfo(torch.float32).tiny
    known, learnt = teacher.to(dtype), student.to(dtype)
    logs = known.clamp(min=least).log() - learnt.clamp(min=least).log()
    return (known * logs).sum(-1).mean(-1)


def _read(scorer: Any, rows: TokenBatch, attention: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states of the embeddings and of each layer [tokens, dim], and attention distributions if wanted."""
    if attention:
        found: tuple[list[Tensor], list[Tensor]] = scorer.encoder.layers_and_attention(rows)
        return found
    return list(scorer.encoder.layers(rows)), []


def _scores(scorer: Any, states: Tensor, batch: RankBatch) -> Tensor:
    """Return scores [batch, docs] from the last layer's states."""
    scores: Tensor = scorer.scores(scorer.read(states, batch.pairs), batch.doc_mask)
    return scores


def _mean(values: Tensor, batch: RankBatch) -> Tensor:
    """Average values [tokens] over each row's tokens, then over a group's docs, then over groups; return a scalar."""
    assert batch.pairs is not None
    lengths = batch.pairs.cu_seqlens.diff().long()
    rows = torch.repeat_interleave(lengths, output_size=len(values))
    sums = values.new_zeros(len(lengths)).index_add(0, rows, values)
    return mean_in_groups(to_grid(sums / lengths.clamp(min=1), batch.doc_mask), batch.doc_mask)
