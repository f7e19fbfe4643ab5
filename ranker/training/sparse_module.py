"""Train learned sparse rankers: a contrastive loss, and penalties on the term weights of a step's texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranker.errors import ConfigError
from ranker.interactions.maxsim import TextVectors
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.contrastive_parts import Penalties
from ranker.types import TrainStep

REGULARIZERS = ("flops", "l1", "df_flops")
MEMORY = 100  # number of steps over which document frequencies are averaged
# parameters of `frequency_factor`: the share of docs at which a term's factor is 1/2, and the steepness of the curve
# around this share (alpha and beta in section 3 of Porco et al., 2025)
HALF, STEEPNESS = 0.1, 10.0


@dataclass(frozen=True)
class Sparsity:
    r"""Penalties on term weights w of the N texts of a step.

    - `flops`: :math:`\sum_j (\frac{1}{N} \sum_i w_{ij})^2` (Paria et al., 2020, arXiv:2004.05665);
    - `l1`: :math:`\frac{1}{N} \sum_i \sum_j w_{ij}`;
    - `df_flops`: for docs, `flops` with :math:`w_{ij}` times a factor from 0 to 1 that grows with the share of docs
      that have term j (Porco et al., 2025, arXiv:2505.15070); for queries, `flops`.

    Args:
        regularizer: One of `REGULARIZERS`.
        query_penalty: Factor of the penalty on queries. It has no effect if queries are not encoded by a model.
        doc_penalty: Factor of the penalty on docs.
        penalty_warmup: Share of the training's steps in which both factors grow from 0, as the square of the step.
    """

    regularizer: str = "flops"
    query_penalty: float = 0.0
    doc_penalty: float = 0.0
    penalty_warmup: float = 0.0

    def check(self) -> None:
        """Check that all values are in range.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.regularizer not in REGULARIZERS:
            raise ConfigError(f"model.regularizer: expected one of {', '.join(REGULARIZERS)}; got {self.regularizer!r}")
        for key in ("query_penalty", "doc_penalty", "penalty_warmup"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0) or (key == "penalty_warmup" and value > 1):
                upper = " and at most 1" if key == "penalty_warmup" else ""
                raise ConfigError(f"model.{key}: expected a finite number of at least 0{upper}, got {value}")


class SparseModule(ContrastiveModule):
    """Train a sparse ranker with the loss on a whole step's scores, plus penalties on the step's term weights.

    The penalties are functions of means over all texts of a step. Every device has all texts' vectors, so the penalties
    depend neither on the number of devices nor on the memory budget.

    Args:
        args: As in ContrastiveModule.
        sparsity: The penalties.
        options: As in ContrastiveModule.

    Attributes:
        factor: Factor of the penalties at this step, a scalar tensor. It grows during the warm-up.
        frequencies: Share of docs that have each term, averaged over steps, [words]; empty except for `df_flops`.
        averaged: Number of steps averaged in `frequencies`, a scalar tensor.
    """

    def __init__(self, *args: Any, sparsity: Sparsity, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sparsity = sparsity
        words = self.scorer.dim if sparsity.regularizer == "df_flops" else 0
        self.factor: Tensor
        self.frequencies: Tensor
        self.averaged: Tensor
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("frequencies", torch.zeros(words))
        self.register_buffer("averaged", torch.zeros(()))
        self._counted: Tensor | None = None
        self._figures: dict[str, Tensor] = {}

    def penalties(self, queries: TextVectors, docs: TextVectors, step: TrainStep) -> Penalties:
        """Return the penalties on the step's term weights, and their gradients."""
        if not step.seeds:  # only a step of `ranker replay` has seeds; its factor was stored with the weights
            self.factor.fill_(self._warmup())
        importance = None
        if self.sparsity.regularizer == "df_flops":
            self._counted = self._averaged(docs.values)
            importance = frequency_factor(self._counted)
        of_queries, by_query = penalty(self.sparsity.regularizer, queries.values, None)
        of_docs, by_doc = penalty(self.sparsity.regularizer, docs.values, importance)
        for_queries = self.factor.to(of_docs) * self.sparsity.query_penalty
        for_docs = self.factor.to(of_docs) * self.sparsity.doc_penalty
        if not getattr(self.scorer, "encodes_queries", True):
            for_queries = torch.zeros_like(for_queries)
        self._figures = {
            "train/query_penalty": of_queries, "train/doc_penalty": of_docs,
            "train/query_terms": (queries.values > 0).sum(1).double().mean(),
            "train/doc_terms": (docs.values > 0).sum(1).double().mean(),
        }  # fmt: skip
        value = for_queries * of_queries + for_docs * of_docs
        return Penalties(value, (for_queries * by_query).unsqueeze(0), (for_docs * by_doc).unsqueeze(0))

    def update_other_state(self, step: TrainStep, finite: Tensor) -> None:
        """Keep the step's document frequencies if `finite` (a bool scalar); log penalties and mean numbers of terms."""
        if self._counted is not None:
            self.frequencies.copy_(torch.where(finite, self._counted.to(self.frequencies), self.frequencies))
            self.averaged += finite.to(self.averaged)
            self._counted = None
        for name, value in self._figures.items():
            self.log(name, value.float())

    def _warmup(self) -> float:
        total = self.optimization.total_steps or int(self.trainer.estimated_stepping_batches)
        steps = self.sparsity.penalty_warmup * total
        return 1.0 if steps <= 0 else min(1.0, (self.trainer.global_step + 1) / steps) ** 2

    def _averaged(self, docs: Tensor) -> Tensor:
        """Return the average of the earlier steps' document frequencies and of those of `docs` [docs, words]."""
        share = (docs > 0).to(self.frequencies.dtype).mean(0)
        return self.frequencies + (share - self.frequencies) / (self.averaged + 1).clamp(max=MEMORY)


def penalty(regularizer: str, weights: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a penalty on term weights [texts, words], a scalar, and its gradient [words], equal for all texts.

    The gradient holds for positive weights. A weight of 0 passes on no gradient, since its activation has slope 0.

    Args:
        regularizer: One of `REGULARIZERS`.
        weights: At least 0.
        importance: Factor on the mean weight of each word, [words]; None: 1.

    >>> penalty("flops", torch.tensor([[1.0, 0.0], [3.0, 2.0]]), None)
    (tensor(5.), tensor([2., 1.]))
    >>> penalty("l1", torch.tensor([[1.0, 0.0], [3.0, 2.0]]), None)
    (tensor(3.), tensor([0.5000, 0.5000]))
    """
    means = weights.mean(0)
    if regularizer == "l1":
        return means.sum(), torch.full_like(means, 1 / len(weights))
    scale = torch.ones_like(means) if importance is None else importance.to(means) ** 2
    return (scale * means**2).sum(), 2 * scale * means / len(weights)


def frequency_factor(frequencies: Tensor) -> Tensor:
    r"""Return the factor of `df_flops`, [words]: 0 for a term in no doc, 1/2 in a tenth of the docs, 1 in all docs.

    .. math:: \frac{1}{1 + (x^{\log_\alpha 2} - 1)^\beta}

    Source: Porco et al., 2025, arXiv:2505.15070, with alpha 0.1 and beta 10.

    Args:
        frequencies: Share of docs that have each term, [words].

    >>> frequency_factor(torch.tensor([0.0, 0.1, 1.0], dtype=torch.float64)).round(decimals=6)
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    grown = frequencies.clamp(max=1) ** (math.log(2) / math.log(HALF))
    return 1 / (1 + (grown - 1) ** STEEPNESS)
