"""Inverse cloze: which passage is a sentence taken from? (ORQA, Lee et al., 2019, arXiv:1906.00300, section 4)."""

from __future__ import annotations

import numpy as np

from ranker.errors import ConfigError
from ranker.pretraining.sentences import PseudoQueries, TextPairs, sentence_ends, sentences
from ranker.pretraining.texts import Texts, below, uniform

SENTENCE, KEPT = 111, 112  # hashed into the random draws, so that the two draws are independent


class InverseCloze(TextPairs):
    r"""Contrastive loss: the query is a sentence, and the relevant passage is the rest of its block.

    .. math:: L = \mathrm{mean}_q -\log \frac{e^{s(q, b_q)}}{\sum_b e^{s(q, b)}}

    where :math:`b_q` is the relevant passage and b runs over the step's passages. A block with fewer than two sentences
    is not used.

    Args:
        keep: Share of pairs in which the passage also contains the sentence, so that the model also learns to match
            equal words.
        shortest: Smallest number of tokens of a sentence; a shorter one is joined with the next.
        pooling: How the states of a text are combined into a vector, as in `DPR`.
        temperature: Divides the cosine of two vectors.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, keep: float = 0.1, shortest: int = 5, pooling: str = "mean", temperature: float = 0.05) -> None:
        if not 0 <= keep <= 1:
            raise ConfigError(f"objective.keep: expected a share from 0 to 1, got {keep!r}")
        super().__init__(pooling, temperature)
        self.keep, self.shortest = keep, shortest

    def draws(self, texts: Texts) -> ClozePairs:
        """Return the object that draws sentences and the rest of their blocks."""
        return ClozePairs(texts, self.keep, self.shortest)


class ClozePairs(PseudoQueries):
    """Draws a sentence of each block, and the rest of the block.

    Args:
        texts: The docs.
        keep: See `InverseCloze`.
        shortest: See `InverseCloze`.
    """

    def __init__(self, texts: Texts, keep: float, shortest: int) -> None:
        self.keep, self.shortest, self.ends = keep, shortest, sentence_ends(texts.tokenizer)
        blocks = texts.blocks()
        every = range(len(blocks.docs))
        kept = [i for i in every if len(sentences(blocks.take(np.array([i]))[0], self.ends, shortest)) > 2]
        self.blocks = blocks.those(np.array(kept, dtype=np.int64))
        super().__init__(texts, self.blocks.docs, ("inverse cloze", keep, shortest))

    def pair(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sentence, and whether it stays in its block."""
        tokens = self.blocks.take(np.array([group]))[0]
        borders = sentences(tokens, self.ends, self.shortest)
        number = int(below(len(borders) - 1, self.texts.seed, epoch, SENTENCE, group))
        first, last = borders[number], borders[number + 1]
        whole = uniform(self.texts.seed, epoch, KEPT, group) < self.keep
        return tokens[first:last], tokens if whole else np.concatenate([tokens[:first], tokens[last:]])
