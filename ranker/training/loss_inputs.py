"""What some losses read besides scores, labels and mask: a frozen reference's scores, or the seed of random draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.lora import adapters_off
from ranker.errors import ConfigError
from ranker.types import Loss, RankBatch


def against_reference(loss: Any) -> bool:
    """Whether a loss, or any loss of a mix of sets, compares the scores with those of a frozen reference."""
    return any(getattr(part, "against_reference", False) for part in getattr(loss, "losses", [loss]))


def check_reference(scorer: nn.Module) -> None:
    """Refuse a scorer that trains other weights than adapters: without its adapters, it would not be a frozen model.

    Raises:
        ConfigError: A trained weight does not belong to an adapter, or there are no adapters.
    """
    trained = [name for name, weight in scorer.named_parameters() if weight.requires_grad]
    others = [name for name in trained if ".lora_" not in name]
    if others or not trained:
        raise ConfigError(
            "loss: expected a model that trains adapters alone for loss=dpo, whose reference is the model without them "
            f"(lora=default, and for model=lm_reranker model.head=yes_no); got {', '.join(others[:3]) or 'none'}"
        )


@torch.no_grad()
def reference_scores(scorer: Any, batch: RankBatch) -> Tensor:
    """Return the scores [batch, docs] of a scorer without its adapters and without dropout."""
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
        reference: The reference's scores [batch, docs], for a loss that compares with them.
        seed: Seed of the step, for a loss that draws.
        rows: Which groups: a slice of the batch.
    """
    options: dict[str, Any] = {}
    if getattr(loss, "draws", False):
        options = {"seed": seed, "group_ids": batch.group_ids[rows]}
    if getattr(loss, "against_reference", False):
        assert reference is not None
        scores = scores - reference
    return loss(scores[rows], batch.labels[rows], batch.doc_mask[rows], **options)
