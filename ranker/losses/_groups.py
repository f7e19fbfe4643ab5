"""Functions that losses share: they mask cells without a doc, compute values per group, and check options."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ranker.errors import ConfigError


def require_positive(key: str, value: float) -> float:
    """Return `value` if it is a finite number above 0.

    Raises:
        ConfigError: The value is not such a number; the message names `key`, the dotted configuration key.
    """
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{key}: expected a finite number above 0, got {value!r}; set {key} to such a number, for example 1.0"
        )
    return value


def real_cells(scores: Tensor, labels: Tensor, doc_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and labels [batch, docs] in one dtype, with 0 where a group has no doc.

    The dtype is float64 if the scores are float64, else float32, because half precision is too coarse for sums of
    exponentials, and labels may be integers. The 0 is filled in before any arithmetic: a NaN or inf in an empty cell
    would survive a multiplication by the mask, and a `where` at the end would hide the NaN in the value but not in the
    gradient.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.to(dtype).masked_fill(~doc_mask, 0.0), labels.to(dtype).masked_fill(~doc_mask, 0.0)


def gaps(values: Tensor) -> Tensor:
    """Return `values[i] - values[j]` for all pairs of a group's docs, [batch, docs, docs]; values are [batch, docs]."""
    return values.unsqueeze(2) - values.unsqueeze(1)


def ordered_pairs(labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return whether doc i has a higher label than doc j and both are real, bool [batch, docs, docs]."""
    return (labels.unsqueeze(2) > labels.unsqueeze(1)) & doc_mask.unsqueeze(2) & doc_mask.unsqueeze(1)


def mean_in_groups(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean over groups of each group's mean over its chosen cells, a scalar.

    A group without a chosen cell has the mean 0 and is included. Both arguments are [batch, ...]; `chosen` is bool.
    """
    sums = values.masked_fill(~chosen, 0.0).flatten(1).sum(1)
    return (sums / chosen.flatten(1).sum(1).clamp(min=1)).mean()


def log_softmax(values: Tensor, doc_mask: Tensor) -> Tensor:
    """Return each doc's log-probability in its group, and 0 for cells without a doc, [batch, docs]."""
    # Masked cells get the lowest finite number. With -inf, a group without docs would have only -inf as logits, so that
    # the softmax and its gradient would be NaN.
    logits = values.masked_fill(~doc_mask, torch.finfo(values.dtype).min)
    return functional.log_softmax(logits, dim=1).masked_fill(~doc_mask, 0.0)


def label_ranks(labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return each doc's 1-based rank by descending label, [batch, docs]; equal labels share the mean of their ranks.

    A cell without a doc has rank 1, so that every function of the rank is finite.
    """
    higher = ordered_pairs(labels, doc_mask).sum(1)
    equal = ((labels.unsqueeze(2) == labels.unsqueeze(1)) & doc_mask.unsqueeze(2)).sum(1)
    return (higher + (equal + 1) / 2).masked_fill(~doc_mask, 1.0).to(labels.dtype)


def has_lower(labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return whether another doc of the group has a lower label, bool [batch, docs]."""
    return ordered_pairs(labels, doc_mask).any(2)


def choice_losses(scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return each doc's negative log-probability among the docs whose label is not higher, [batch, docs].

    With distinct labels, their sum is the Plackett-Luce negative log-likelihood of the order by label. Equal labels
    share a denominator (Breslow, 1974), so the values do not depend on the order of docs in the batch.
    """
    not_higher = (labels.unsqueeze(2) >= labels.unsqueeze(1)) & doc_mask.unsqueeze(1)
    lowest = torch.finfo(scores.dtype).min
    logits = scores.unsqueeze(1).expand_as(not_higher).masked_fill(~not_higher, lowest)
    return logits.logsumexp(2) - scores


def discounts(ranks: Tensor) -> Tensor:
    """Return the discount of nDCG at 1-based ranks, 1 / log2(1 + rank); any shape."""
    return 1.0 / torch.log2(1.0 + ranks)


def ndcg_gains(labels: Tensor, doc_mask: Tensor, k: int | None = None) -> Tensor:
    """Return normalised gains [batch, docs], whose discounted sum is nDCG@k: (2^label - 1) / (best possible DCG@k).

    A label below 0 has gain 0, as in trec_eval; a group without a label above 0 has gain 0 everywhere.
    """
    grades = labels.masked_fill(~doc_mask, 0.0).clamp(min=0.0)
    top = grades.amax(1, keepdim=True)
    # gains are divided by 2^top to prevent an overflow; the factor cancels in the ratio below
    gains = torch.exp2(grades - top) - torch.exp2(-top)
    ideal = gains.sort(dim=1, descending=True).values[:, :k]
    ranks = torch.arange(1, ideal.shape[1] + 1, device=labels.device, dtype=labels.dtype)
    best = (ideal * discounts(ranks)).sum(1, keepdim=True)
    return gains / best.masked_fill(best == 0, 1.0)
