"""Representative words: which of two word sets represents a text better? (PROP, Ma et al., 2021, arXiv:2010.10137)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.data.ragged import ranges
from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.fit import check_layout
from ranker.errors import ConfigError
from ranker.interactions.pooling import pool
from ranker.pretraining.masking import Masked, MaskedBatch, Masking, hidden_of, mask, masked_loss
from ranker.pretraining.module import MaskedModel, PretrainModule, linear_layer
from ranker.pretraining.texts import Ragged, Texts, lay_out, uniform
from ranker.pretraining.words import Vocabulary, WordModel, words_of
from ranker.training.rerank_module import RerankModule

SIZE, PICK = 131, 132  # hashed into the random draws, so that the two draws are independent


class PROP:
    r"""A hinge loss that compares two word sets drawn from each block, plus a masked language modelling loss.

    .. math:: L = \mathrm{mean}_{blocks} \max(0, m - s(S^+, D) + s(S^-, D)) + \mathrm{mean}_{masked} -\log p(w_i)

    D is a block (a piece of a doc), m the margin, and :math:`S^+` the word set with the higher likelihood. Both sets
    have the same number of words, at least one, drawn from a Poisson distribution. Words are drawn with replacement
    from the words of the block, with the probabilities of the block's language model (`WordModel`). English stop words
    and punctuation are never drawn. If both sets are equally likely, the block has no hinge loss. A row contains a word
    set (at the position of a query) and the block. The score s of the row is a linear layer on its first token's state.
    Only tokens of the block are masked for prediction, never tokens of the word set.

    Args:
        words: Mean number of words of a set.
        mu: Dirichlet smoothing parameter of the block's language model: the collection counts like `mu` additional
            words. 2000 is a usual value.
        margin: Least difference of the two scores at which the hinge loss is 0.
        share: See `Masking`.
        masked: See `Masking`.
        random: See `Masking`.

    Raises:
        ConfigError: A value is out of range.
    """

    pairs = True

    def __init__(
        self,
        words: float = 3.0,
        mu: float = 2000.0,
        margin: float = 1.0,
        share: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
    ) -> None:
        for key, value in (("words", words), ("mu", mu), ("margin", margin)):
            if value <= 0:
                raise ConfigError(f"objective.{key}: expected a number above 0, got {value!r}")
        self.words, self.mu, self.margin = words, mu, margin
        self.masking = Masking(share, masked, random)

    def model(self, encoder: Encoder) -> PROPModel:
        """Return the encoder with a score head and the head of its masked language model."""
        return PROPModel(encoder, self.margin)

    def draws(self, texts: Texts) -> WordSets:
        """Return the object that draws two word sets for each block."""
        return WordSets(texts, self.words, self.mu, self.masking)

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the module that trains the model."""
        return PretrainModule(model, [], **options)


class PROPModel(MaskedModel):
    """An encoder with a linear score of the first state, and with its family's head for masked language modelling.

    Args:
        encoder: The encoder.
        margin: See `PROP`.
    """

    def __init__(self, encoder: Encoder, margin: float) -> None:
        check_layout(encoder, 2, "cls")
        super().__init__(encoder)
        self.margin, self.score = margin, linear_layer(encoder, 1)

    def forward(self, batch: MaskedBatch) -> Tensor:
        """Return the micro-batch's part of the step's loss, a scalar."""
        assert batch.pairs is not None and batch.hidden is not None
        states = self.encoder(batch.pairs)
        scores = self.score(pool(states, batch.pairs, "cls")).view(-1, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        sign = batch.labels[:, 0] - batch.labels[:, 1]  # 1: the first set is more likely, -1: the second, 0: equal
        gaps = functional.relu(self.margin - sign * (scores[:, 0] - scores[:, 1])) * sign.abs()
        return gaps.sum() / max(1, batch.of_step) + masked_loss(self.head, states, batch.hidden)


class WordSets:
    """Draws two sets of words for each block that has at least two words.

    Args:
        texts: The docs.
        words: See `PROP`.
        mu: See `PROP`.
        masking: How tokens are masked.
    """

    def __init__(self, texts: Texts, words: float, mu: float, masking: Masking) -> None:
        self.texts, self.words, self.mu, self.masking = texts, words, mu, masking
        self.vocabulary = Vocabulary.of(texts.tokenizer)
        self.layout = Template.of(texts.tokenizer, 2)
        self.model = WordModel(texts.store, self.vocabulary, mu)
        blocks = texts.blocks()
        found = (len(words_of(blocks.take(np.array([i]))[0], self.vocabulary).starts) for i in range(len(blocks.docs)))
        self.blocks = blocks.those(np.array([i for i, count in enumerate(found) if count > 1], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.blocks.docs)

    def largest(self) -> int:
        """Return the largest number of tokens that both rows of a block can have together."""
        return 2 * (int(self.blocks.lengths.max()) + self.texts.max_query_tokens + self.layout.num_special)

    def step(self, epoch: int, groups: np.ndarray) -> WordSetRows:
        """Return the rows of a step, two for each group."""
        blocks = self.blocks.take(groups)
        sets, better = [], []
        for i, group in enumerate(groups.tolist()):
            two, likelihoods = self.sets(epoch, group, blocks[i])
            sets += two
            better.append(np.sign(likelihoods[0] - likelihoods[1]))
        twice = np.repeat(np.arange(len(groups)), 2)
        rows = Ragged.of([blocks[i] for i in twice])
        numbers = 2 * np.repeat(groups, 2) + np.tile([0, 1], len(groups))
        masked = mask(rows, numbers, epoch, self.masking, self.texts)
        return WordSetRows(Ragged.of(sets), masked, np.array(better), self.layout)

    def sets(self, epoch: int, group: int, tokens: np.ndarray) -> tuple[list[np.ndarray], tuple[float, float]]:
        """Draw two sets of words of a block; return the tokens of each set, and the log-likelihood of each set.

        Args:
            epoch: The epoch.
            group: Index of the block.
            tokens: Tokens of the block, int64 [tokens].
        """
        seed = self.texts.seed
        words = words_of(tokens, self.vocabulary)
        different, first, counts = np.unique(words.hashes, return_index=True, return_counts=True)
        likelihoods = self.model.likelihoods(different, counts)
        order = np.argsort(first)  # words in the order of the text, because the order of hashes is arbitrary
        ends = np.cumsum(likelihoods[order])
        size = max(1, poisson(float(uniform(seed, epoch, SIZE, group)), self.words))
        draws = uniform(seed, epoch, PICK, group, np.arange(2)[:, None], np.arange(size)[None, :])
        picked = order[np.minimum(np.searchsorted(ends, draws * ends[-1], side="right"), len(order) - 1)]
        logs = np.sort(np.log(likelihoods[picked]), axis=1).sum(axis=1)  # sorted, so equal sets have the same sum
        chosen = first[picked]
        texts = [tokens[ranges(words.starts[row], words.lengths[row])] for row in chosen]
        return [text[: self.texts.max_query_tokens] for text in texts], (float(logs[0]), float(logs[1]))

    def fingerprint(self) -> str:
        """Return a hash of everything that the draws depend on, except the seed."""
        return self.texts.fingerprint("word sets", self.words, self.mu, self.masking)


class WordSetRows:
    """The rows of a step. Each group has two rows: its block with the first set, and its block with the second set.

    Args:
        sets: Tokens of the word sets, two sets for each group.
        masked: Two masked copies of each group's block; each copy has different masked tokens.
        better: 1 if a group's first set is more likely, -1 if its second set is, 0 if they are equal [groups].
        layout: The special tokens around a set and a block.
    """

    contrast = None

    def __init__(self, sets: Ragged, masked: Masked, better: np.ndarray, layout: Template) -> None:
        self.sets, self.masked, self.better, self.layout = sets, masked, better, layout
        self.row_sizes = layout.row_lengths(sets.lengths + masked.rows.lengths)
        self.sizes = self.row_sizes.reshape(-1, 2).sum(axis=1)

    def batch(self, chosen: np.ndarray) -> MaskedBatch:
        """Return the micro-batch of some groups."""
        rows = (2 * chosen[:, None] + np.arange(2)).ravel()
        pairs = lay_out(self.layout, [self.sets, self.masked.rows], rows, rows)
        starts = pairs.cu_seqlens[1:].numpy().astype(np.int64) - len(self.layout.specials[2])
        starts = starts - self.masked.rows.lengths[rows]
        better = torch.from_numpy(self.better[chosen])
        labels = torch.stack([better > 0, better < 0], dim=1).float()
        return MaskedBatch(
            labels,
            torch.ones_like(labels, dtype=torch.bool),
            torch.from_numpy(chosen.astype(np.int64)),
            1.0,
            pairs=pairs,
            hidden=hidden_of(self.masked, rows, starts),
            of_step=int((self.better != 0).sum()),
        )


def poisson(draw: float, mean: float) -> int:
    """Return a Poisson sample by inverting the cumulative distribution at `draw`, a number in [0, 1).

    The result is at most 100.

    >>> poisson(0.0, 3.0), poisson(0.04, 3.0), poisson(0.05, 3.0), poisson(0.999, 3.0)
    (0, 0, 1, 10)
    """
    share = total = float(np.exp(-mean))
    number = 0
    while draw >= total and number < 100:
        number += 1
        share *= mean / number
        total += share
    return number
