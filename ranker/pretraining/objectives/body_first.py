"""Body-first selection: which passage is from a sentence's doc? (Chang et al., 2020, arXiv:2002.03932, section 3)."""

from __future__ import annotations

import numpy as np

from ranker.errors import ConfigError
from ranker.pretraining.sentences import PseudoQueries, TextPairs, sentence_ends, sentences
from ranker.pretraining.texts import Texts, below

SENTENCE, PASSAGE = 121, 122  # hashed into the random draws, so that the two draws are independent


class BodyFirst(TextPairs):
    r"""Contrastive loss: the query is a sentence from the beginning of a doc; its relevant passage is from the body.

    .. math:: L = \mathrm{mean}_q -\log \frac{e^{s(q, b_q)}}{\sum_b e^{s(q, b)}}

    where :math:`b_q` is the relevant passage and b runs over the step's passages. The beginning of a doc is its first
    `first` sentences (in the paper, the first section of a page). The body is the rest, cut into passages of nearly
    equal length. If a doc has at most `first` sentences, its body is its last sentence. A doc of a single sentence is
    not used.

    Args:
        first: Number of sentences of the beginning.
        shortest: Smallest number of tokens of a sentence; a shorter one is joined with the next.
        pooling: How the states of a text are combined into a vector, as in `DPR`.
        temperature: Divides the cosine of two vectors.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, first: int = 3, shortest: int = 5, pooling: str = "mean", temperature: float = 0.05) -> None:
        if first < 1:
            raise ConfigError(f"objective.first: expected at least 1 sentence, got {first!r}")
        super().__init__(pooling, temperature)
        self.first, self.shortest = first, shortest

    def draws(self, texts: Texts) -> BodyPairs:
        """Return the object that draws, for each doc, a sentence of its beginning and a passage of its body."""
        return BodyPairs(texts, self.first, self.shortest)


class BodyPairs(PseudoQueries):
    """Draws a sentence of each doc's beginning and a passage of its body.

    Args:
        texts: The docs.
        first: See `BodyFirst`.
        shortest: See `BodyFirst`.
    """

    def __init__(self, texts: Texts, first: int, shortest: int) -> None:
        self.first, self.shortest, self.ends = first, shortest, sentence_ends(texts.tokenizer)
        store = texts.store
        docs = [doc for doc in range(len(store)) if len(sentences(store[doc], self.ends, shortest)) > 2]
        super().__init__(texts, np.array(docs, dtype=np.int64), ("body first", first, shortest))

    def pair(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sentence of the beginning and a passage of the body."""
        tokens = self.texts.store[int(self.owners[group])].astype(np.int64)
        borders = sentences(tokens, self.ends, self.shortest)
        beginning = min(self.first, len(borders) - 2)
        number = int(below(beginning, self.texts.seed, epoch, SENTENCE, group))
        body = tokens[borders[beginning] :]
        parts = -(-len(body) // self.texts.max_tokens)
        part = int(below(parts, self.texts.seed, epoch, PASSAGE, group))
        passage = body[part * len(body) // parts : (part + 1) * len(body) // parts]
        return tokens[borders[number] : borders[number + 1]], passage
