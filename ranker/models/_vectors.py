"""Shared code of models with one vector per text: similarity, temperature, scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.errors import ConfigError
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors
from ranker.models._bi_encoder import SIMILARITIES, check_choice
from ranker.types import RankBatch, TokenBatch

LEAST_TEMPERATURE = 0.01  # lower bound of a learned temperature, as in CLIP


class VectorScorer(nn.Module):
    """A bi-encoder with one vector per text; a score is the similarity of two vectors, divided by the temperature.

    Args:
        similarity: `cosine` or `dot`.
        temperature: Divisor of the similarities; must be positive.
        learn_temperature: Whether the temperature is trained (never below `LEAST_TEMPERATURE`).
    """

    encode_queries: Callable[[TokenBatch], TextVectors]
    encode_docs: Callable[[TokenBatch], TextVectors]

    def __init__(self, similarity: str, temperature: float, learn_temperature: bool) -> None:
        super().__init__()
        check_choice("model.similarity", similarity, SIMILARITIES)
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"model.temperature: expected a finite number above 0, got {temperature}")
        self.similarity = similarity
        self.fixed_temperature = temperature
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature))) if learn_temperature else None

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return 1 for each doc, int64 [docs]."""
        return torch.ones(batch.num_rows, dtype=torch.int64, device=batch.tokens.device)

    def compared(self, vectors: Tensor) -> Tensor:
        """Return vectors [texts, dim] ready for comparison: for the cosine, scaled to length 1."""
        return functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs]."""
        with torch.autocast(queries.values.device.type, enabled=False):
            return queries.values @ docs.values.T / self.divisor()

    def scoring_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that `score_block` reads: the temperature, if it is learned."""
        return [] if self.log_temperature is None else [self.log_temperature]

    def divisor(self) -> Tensor | float:
        """Return the temperature, by which similarities are divided."""
        if self.log_temperature is None:
            return self.fixed_temperature
        limited = self.log_temperature.clamp(min=math.log(LEAST_TEMPERATURE))
        # the gradient ignores the limit; otherwise a temperature below the limit would never change again
        return (self.log_temperature + (limited - self.log_temperature).detach()).exp()

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with the docs of its group; 0 in cells without a doc."""
        assert batch.queries is not None and batch.docs is not None
        docs = self.encode_docs(batch.docs)  # docs are encoded before queries, as in ContrastiveModule
        return self.score_grid(self.encode_queries(batch.queries), docs, batch.doc_mask)

    def score_grid(self, queries: TextVectors, docs: TextVectors, doc_mask: Tensor) -> Tensor:
        """Return scores [batch, docs] of each query with the docs of its group, from one vector each.

        Args:
            queries: Vectors of the queries.
            docs: Vectors of the docs, in the order of the True cells of `doc_mask`.
            doc_mask: True for real docs, bool [batch, docs].
        """
        owners = doc_mask.nonzero_static(size=docs.num_texts)[:, 0]
        with torch.autocast(docs.values.device.type, enabled=False):
            scores = (queries.values.index_select(0, owners) * docs.values).sum(1) / self.divisor()
        return to_grid(scores, doc_mask)
