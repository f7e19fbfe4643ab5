"""Pseudo-queries: a sentence of a doc is used as a query, and another part of the same doc as the relevant doc."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from ranker.data.contrast import own_docs
from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.losses.infonce import InfoNCE
from ranker.models.dpr import DPR
from ranker.pretraining.texts import Ragged, Texts, lay_out, pieces_of
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.rerank_module import RerankModule
from ranker.types import Contrast, RankBatch

ENDS = re.compile(r"[.!?…。！？।]+[\"')\]”’»]*$")


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """Return True for token ids that end a sentence, such as those of `.`, `?` and `!`, bool [vocabulary]."""
    return np.array([bool(ENDS.fullmatch(piece.lstrip("#Ġ▁"))) for piece in pieces_of(tokenizer)])


def sentences(tokens: np.ndarray, ends: np.ndarray, shortest: int) -> np.ndarray:
    """Return the index of the first token of each sentence, and at the end the number of tokens, int64 [sentences + 1].

    A sentence ends after a token of `ends`. If it is shorter than `shortest`, the next sentence is added to it. If the
    last sentence of a text is too short, it is added to the sentence before it.

    Args:
        tokens: The tokens of a text.
        ends: True for token ids that end a sentence, bool [vocabulary].
        shortest: Smallest number of tokens of a sentence.

    >>> sentences(np.array([5, 5, 1, 5, 1, 5, 5, 5]), np.arange(9) == 1, 3).tolist()
    [0, 3, 8]
    """
    borders = [0]
    for end in (np.flatnonzero(ends[tokens]) + 1).tolist():
        if end - borders[-1] >= shortest:
            borders.append(end)
    if borders[-1] != len(tokens):
        if len(borders) > 1 and len(tokens) - borders[-1] < shortest:
            borders.pop()
        borders.append(len(tokens))
    return np.array(borders, dtype=np.int64)


class PseudoQueries(ABC):
    """Draws a pair of a pseudo-query and a relevant doc for each group.

    Args:
        texts: The docs.
        owners: Index of the doc from which each group is drawn, int64 [groups]. Groups of the same doc are no negatives
            of each other.
        options: Values, besides the texts, on which the draws depend; they become part of the fingerprint.
    """

    def __init__(self, texts: Texts, owners: np.ndarray, options: Any) -> None:
        self.texts, self.owners, self.options = texts, owners, options
        self.layout = Template.of(texts.tokenizer, 1)

    @abstractmethod
    def pair(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the tokens of a group's pseudo-query and of its doc."""

    def __len__(self) -> int:
        return len(self.owners)

    def largest(self) -> int:
        """Return the largest number of tokens that a pair can have."""
        return self.texts.max_tokens + self.texts.max_query_tokens + 2 * self.layout.num_special

    def step(self, epoch: int, groups: np.ndarray) -> QueryRows:
        """Return the rows of a step."""
        pairs = [self.pair(epoch, int(group)) for group in groups]
        queries = Ragged.of([query[: self.texts.max_query_tokens] for query, _ in pairs])
        return QueryRows(queries, Ragged.of([doc for _, doc in pairs]), self.owners[groups], self.layout)

    def fingerprint(self) -> str:
        """Return a hash of everything that the draws depend on, except the seed."""
        return self.texts.fingerprint(self.options)


class QueryRows:
    """The rows of a step: a pseudo-query and a doc of each group.

    Each pseudo-query is compared with its own doc and with the docs of other groups. Two kinds of other docs are left
    out: those from the same doc of the collection as the query, and those with the same tokens as the query's own doc.

    Args:
        queries: Tokens of the pseudo-queries.
        docs: Tokens of the docs.
        owners: Index of the collection's doc from which each group is drawn, int64 [groups].
        layout: The special tokens around a text.
    """

    def __init__(self, queries: Ragged, docs: Ragged, owners: np.ndarray, layout: Template) -> None:
        self.queries, self.docs, self.layout = queries, docs, layout
        self.sizes = layout.row_lengths(queries.lengths) + layout.row_lengths(docs.lengths)
        keys = docs.keys()
        same = (owners[:, None] == owners) | (keys[:, None] == keys)
        own = np.eye(len(owners), dtype=bool)
        contrast = own_docs(np.arange(len(owners))[:, None], np.ones((len(owners), 1)))
        self.contrast = Contrast(contrast.labels, contrast.owners, torch.from_numpy(own | ~same), contrast.positive)

    def batch(self, chosen: np.ndarray) -> RankBatch:
        """Return the micro-batch of some groups."""
        numbers = torch.from_numpy(chosen.astype(np.int64))
        return RankBatch(
            torch.ones(len(chosen), 1),
            torch.ones(len(chosen), 1, dtype=torch.bool),
            numbers,
            len(chosen) / len(self.sizes),
            queries=lay_out(self.layout, [self.queries], chosen, 2 * chosen),
            docs=lay_out(self.layout, [self.docs], chosen, 2 * chosen + 1),
        )


class TextPairs:
    """Base of the objectives that train a bi-encoder: a pseudo-query and its doc get similar vectors.

    Args:
        pooling: How the states of a text are combined into a vector, as in `DPR`.
        temperature: Divides the cosine of two vectors.
    """

    pairs = False
    compares_texts = True

    def __init__(self, pooling: str, temperature: float) -> None:
        self.pooling, self.temperature = pooling, temperature

    def model(self, encoder: Encoder) -> DPR:
        """Return a bi-encoder with one encoder for pseudo-queries and docs, and cosine similarity."""
        return DPR(encoder, pooling=self.pooling, similarity="cosine", temperature=self.temperature)

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the module that trains the bi-encoder on the whole step, with in-batch negatives."""
        return ContrastiveModule(model, [], loss=InfoNCE(), **options)
