"""Compute what some losses read besides scores, labels and mask: a frozen reference's scores, or a random seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.lora_layers import adapters_off
from ranker.errors import ConfigError
from ranker.types import Loss, RankBatch


def against_reference(loss: Any) -> bool:
    """Return whether a loss, or a loss of any set of a mix, compares scores with those of a frozen reference model."""
    return any(getattr(part, "against_reference", False) for part in getattr(loss, "losses", [loss]))


def check_reference(scorer: nn.Module) -> None:
    """Check that a scorer trains adapters only, so that the scorer without adapters is a frozen reference model.

    Raises:
        ConfigError: There are no adapters, or a trained weight does not belong to an adapter.
    """
    trained = [name for name, weight in scorer.named_parameters() if weight.requires_grad]
    others = [name for name in trained if ".lora_" not in name]
    if others or not trained:
        raise ConfigError(
            "loss: expected a model that trains adapters alone for loss=dpo, whose reference is the model without "
            "adapters (lora=default, and for model=lm_reranker model.head=yes_no); got "
            f"{', '.join(others[:3]) or 'none'}"
        )


@torch.no_grad()
def reference_scores(scorer: Any, batch: RankBatch) -> Tensor:
    """Return the scores [batch, docs] of a scorer, computed without its adapters and without dropout."""
    training = scorer.training
    scorer.eval()
    try:
        with adapters_off(scorer):
            scores: Tensor = scorer(batch)
    finally:
        scorer.train(training)
    return scores


def loss_of(
    loss: Loss,
    scores: Tensor,
    batch: RankBatch,
    reference: Tensor | None = None,
    seed: int = 0,
    rows: slice = slice(None),
) -> Tensor:
    """Return the loss of some groups of a batch, a scalar.

    Args:
        loss: The loss.
        scores: [batch, docs].
        batch: The batch.
        reference: The reference's scores [batch, docs], for a loss with `against_reference`.
        seed: Seed of the step, for a loss that draws at random.
        rows: Slice of the batch's groups.
    """
    options: dict[str, Any] = {}
    if getattr(loss, "draws", False):
        options = {"seed": seed, "group_ids": batch.group_ids[rows]}
    if getattr(loss, "against_reference", False):
        assert reference is not None
        scores = scores - reference
    return loss(scores[rows], batch.labels[rows], batch.doc_mask[rows], **options)
