"""What the losses share: cells without a doc count nothing, every group has its own value, options are checked once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ranker.errors import ConfigError


def require_positive(key: str, value: float) -> float:
    """Return `value` if it is a finite number above 0.

    Raises:
        ConfigError: It is not; `key` is the dotted config key to name.
    """
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}: expected a finite number above 0, got {value!r}; set {key} to one, as 1.0")
    return value


def real_cells(scores: Tensor, labels: Tensor, doc_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and labels [batch, docs] in one dtype with 0 where a group has no doc.

    The dtype is float32, or float64 if the scores are; half precision is too coarse for sums of exponentials, and
    labels may be ints. Cells are filled before any arithmetic: a NaN or inf there would survive a multiplication with
    the mask, and also a `where` behind the formula, whose gradient would still be NaN.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.to(dtype).masked_fill(~doc_mask, 0.0), labels.to(dtype).masked_fill(~doc_mask, 0.0)


def gaps(values: Tensor) -> Tensor:
    """Return `values[i] - values[j]` of each group, [batch, docs, docs]."""
    return values.unsqueeze(2) - values.unsqueeze(1)


def ordered_pairs(labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return where doc i has a higher label than doc j and both are real, bool [batch, docs, docs]."""
    return (labels.unsqueeze(2) > labels.unsqueeze(1)) & doc_mask.unsqueeze(2) & doc_mask.unsqueeze(1)


def mean_in_groups(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean over groups of each group's mean over its chosen cells; a group without any counts 0.

    Both [batch, ...].
    """
    sums = values.masked_fill(~chosen, 0.0).flatten(1).sum(1)
    return (sums / chosen.flatten(1).sum(1).clamp(min=1)).mean()


def log_softmax(values: Tensor, doc_mask: Tensor) -> Tensor:
    """Return each real doc's log-probability in its group, and 0 where there is no doc, [batch, docs]."""
    # The lowest finite number instead of -inf: the softmax of nothing but -inf, a group without docs, is NaN and so is
    # its gradient.
    logits = values.masked_fill(~doc_mask, torch.finfo(values.dtype).min)
    return functional.log_softmax(logits, dim=1).masked_fill(~doc_mask, 0.0)


def discounts(ranks: Tensor) -> Tensor:
    """Return what nDCG multiplies a gain by at a rank: 1 / log2(1 + rank)."""
    return 1.0 / torch.log2(1.0 + ranks)


def ndcg_gains(labels: Tensor, doc_mask: Tensor, k: int | None = None) -> Tensor:
    """Return gains [batch, docs] whose discounted sum is nDCG@k: (2^label - 1) over the best possible DCG@k.

    A label below 0 gains nothing, as in trec_eval; a group without a label above 0 has gain 0 everywhere.
    """
    grades = labels.masked_fill(~doc_mask, 0.0).clamp(min=0.0)
    top = grades.amax(1, keepdim=True)
    gains = torch.exp2(grades - top) - torch.exp2(
        -top
    )  # over 2^top, which the ratio below cancels and no label can overflow
    ideal = gains.sort(dim=1, descending=True).values[:, :k]
    ranks = torch.arange(1, ideal.shape[1] + 1, device=labels.device, dtype=labels.dtype)
    best = (ideal * discounts(ranks)).sum(1, keepdim=True)
    return gains / best.masked_fill(best == 0, 1.0)
