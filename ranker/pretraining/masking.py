"""Masked words: choose the tokens of a row that are masked, and the tokens that replace them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.data.ragged import ranges
from ranker.encoders.masked_lm import MaskedLMHead
from ranker.errors import ConfigError
from ranker.hashing import mix
from ranker.pretraining.texts import Ragged, Texts, below, rows_of, uniform
from ranker.types import Movable, RankBatch, TokenBatch

WHICH, HOW, WORD, SAMPLE = 101, 102, 103, 104  # hashed into the random draws, so that the four draws are independent
BLOCK = 2048  # number of masked tokens whose logits are in memory at a time


@dataclass(frozen=True)
class Masking:
    """How tokens are masked (BERT, Devlin et al., 2019, arXiv:1810.04805, section 3.1).

    Args:
        share: Share of each row's tokens to mask and predict. Their number is rounded, and is at least one.
        masked: Share of the masked tokens that become the mask token.
        random: Share of the masked tokens that become a random token; the others stay unchanged.

    Raises:
        ConfigError: A share is out of range.
    """

    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"objective.share: expected a share above 0 and below 1, got {self.share!r}")
        if min(self.masked, self.random) < 0 or self.masked + self.random > 1:
            raise ConfigError(
                "objective.masked: expected shares of at least 0 that sum to at most 1 with objective.random, got "
                f"{self.masked!r} and {self.random!r}"
            )


class Masked(NamedTuple):
    """Rows with masked tokens.

    Attributes:
        rows: The rows as the model sees them.
        row: Index of each masked token's row, ascending, int64 [masked].
        position: Position of each masked token in its row, ascending within a row, int64 [masked].
        words: Original id of each masked token, int64 [masked].
        draws: A uniform random number in [0, 1) for each masked token, with which ELECTRA samples a word, float64
            [masked].
    """

    rows: Ragged
    row: np.ndarray
    position: np.ndarray
    words: np.ndarray
    draws: np.ndarray


def mask(rows: Ragged, numbers: np.ndarray, epoch: int, masking: Masking, texts: Texts) -> Masked:
    """Mask tokens of rows. The choice depends only on the seed, the epoch, a row's index and its length.

    In each row, the positions with the smallest hashes are masked.

    Args:
        rows: The rows, without special tokens.
        numbers: Index of each row's text in the collection, the same in each epoch, int64 [rows].
        epoch: The epoch.
        masking: How tokens are masked.
        texts: The texts, with the tokenizer and the seed.
    """
    lengths, row = rows.lengths, rows_of(rows)
    position, number = ranges(0, lengths), numbers[row]
    hashes = mix(texts.seed, epoch, WHICH, number, position)
    order = np.lexsort((hashes, row))
    counts = np.where(lengths > 0, np.maximum(1, np.floor(masking.share * lengths + 0.5)), 0).astype(np.int64)
    chosen = np.sort(order[ranges(rows.offsets[:-1], counts)])
    number, at = number[chosen], position[chosen]
    how = uniform(texts.seed, epoch, HOW, number, at)
    known = texts.words
    words = rows.tokens[chosen]
    new = np.where(how < masking.masked + masking.random, known[below(len(known), texts.seed, epoch, WORD, number, at)],
                   words)  # fmt: skip
    new = np.where(how < masking.masked, mask_token(texts), new)
    tokens = rows.tokens.copy()
    tokens[chosen] = new
    draws = uniform(texts.seed, epoch, SAMPLE, number, at)
    return Masked(Ragged(tokens, rows.offsets), row[chosen], at, words, draws)


def mask_token(texts: Texts) -> int:
    """Return the id of the mask token.

    Raises:
        ConfigError: The tokenizer has no mask token.
    """
    token = texts.tokenizer.mask_token_id
    if token is None:
        raise ConfigError("encoder: expected a tokenizer with a mask token for this objective, got one without it")
    return int(token)


@dataclass
class Hidden(Movable):
    """The masked tokens of a micro-batch.

    Args:
        positions: Position of each masked token in the micro-batch, int64 [masked].
        words: Original id of each masked token, int64 [masked].
        draws: A uniform random number in [0, 1) for each masked token, float64 [masked].
        of_step: Number of masked tokens of the whole step, over all devices.
    """

    positions: Tensor
    words: Tensor
    draws: Tensor
    of_step: int


def hidden_of(masked: Masked, chosen: np.ndarray, starts: np.ndarray) -> Hidden:
    """Return the masked tokens of some rows of a step.

    Args:
        masked: The rows of the step.
        chosen: Indices of these rows in the step, in the order of the micro-batch, int64 [chosen].
        starts: Index of the first token of each row's text in the micro-batch, int64 [chosen].
    """
    begin = np.searchsorted(masked.row, chosen)
    counts = np.searchsorted(masked.row, chosen, side="right") - begin
    where = ranges(begin, counts)
    positions = np.repeat(starts, counts) + masked.position[where]
    arrays = (positions, masked.words[where], masked.draws[where])
    position, words, draws = map(torch.from_numpy, arrays)
    return Hidden(position, words, draws, len(masked.words))


@dataclass
class MaskedBatch(RankBatch):
    """A micro-batch with masked tokens. Its `share` is 1, because the objective divides by counts of the whole step.

    Args:
        hidden: The masked tokens of the rows.
        of_step: Another count of the whole step by which the objective divides: blocks (PROP) or tokens (ELECTRA).
    """

    hidden: Hidden | None = None
    of_step: int = 0


def masked_batch(rows: TokenBatch, chosen: np.ndarray, hidden: Hidden, of_step: int = 0) -> MaskedBatch:
    """Return the micro-batch of some groups; each group has one row.

    Args:
        rows: The rows.
        chosen: Indices of the groups in the step [groups].
        hidden: The masked tokens.
        of_step: See `MaskedBatch`.
    """
    labels = torch.zeros(len(chosen), 1)
    numbers = torch.from_numpy(chosen.astype(np.int64))
    return MaskedBatch(labels, labels == 0, numbers, 1.0, docs=rows, hidden=hidden, of_step=of_step)


def masked_loss(head: MaskedLMHead, states: Tensor, hidden: Hidden) -> Tensor:
    """Return a micro-batch's part of the step's loss, []: its sum of cross-entropies, divided by the step's count.

    Args:
        head: The head of the masked language model.
        states: Last layer's states of the micro-batch [tokens, dim].
        hidden: The masked tokens of the micro-batch.
    """
    total = states.new_zeros(())
    for where, words in zip(hidden.positions.split(BLOCK), hidden.words.split(BLOCK), strict=True):
        logits = masked_logits(head, states.index_select(0, where))
        total = total + functional.cross_entropy(logits, words, reduction="sum")
    return total / hidden.of_step


def masked_logits(head: MaskedLMHead, states: Tensor) -> Tensor:
    """Return logits of the vocabulary, float32 or float64 [tokens, vocabulary], from states [tokens, dim]."""
    logits = functional.linear(head(states), head.weight, head.bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
