"""Find whole words in rows of tokens; a unigram language model of docs, smoothed with the collection."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ranker.data.ragged import ranges
from ranker.data.stop_words import STOP_WORDS
from ranker.data.token_store import TokenStore
from ranker.hashing import mix
from ranker.pretraining.texts import pieces_of

BUCKETS = 1 << 22  # number of counters for the collection's words; the hash of a word selects its counter
TOKENS = 1 << 22  # number of tokens that are read at a time to count words


class Vocabulary(NamedTuple):
    """Properties of a tokenizer's token ids.

    Attributes:
        in_word: True for tokens that are part of a word, that is, have a letter or a digit, bool [vocabulary].
        begins: True for tokens that begin a new word, bool [vocabulary].
        stop: Hashes of the stop words, uint64 [stop words].
    """

    in_word: np.ndarray
    begins: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read a tokenizer: WordPiece (`##` inside words), byte-level BPE or Unigram (`Ġ` or `▁` before words)."""
        pieces = pieces_of(tokenizer)
        special = set(tokenizer.all_special_ids)
        texts = [piece.removeprefix("##").lstrip("Ġ▁") for piece in pieces]
        in_word = [i not in special and any(char.isalnum() for char in text) for i, text in enumerate(texts)]
        if any(piece.startswith("##") for piece in pieces):
            begins = [not piece.startswith("##") for piece in pieces]
        elif any(piece.startswith(("Ġ", "▁")) for piece in pieces):
            begins = [piece.startswith(("Ġ", "▁")) for piece in pieces]
        else:
            begins = [True] * len(pieces)
        every = cls(np.array(in_word), np.array(begins), np.zeros(0, dtype=np.uint64))
        forms = sorted({form for word in STOP_WORDS for form in (word, f" {word}", word.title(), f" {word.title()}")})
        ids = tokenizer(forms, add_special_tokens=False)["input_ids"]
        hashes = [words_of(np.array(row, dtype=np.int64), every).hashes for row in ids]
        return every._replace(stop=np.unique(np.concatenate([part for part in hashes if len(part) == 1])))


class Words(NamedTuple):
    """The words of a text, without stop words and punctuation.

    Attributes:
        starts: Index of each word's first token, int64 [words].
        lengths: Number of tokens of each word, int64 [words].
        hashes: A hash of the tokens of each word, uint64 [words].
    """

    starts: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray


def words_of(tokens: np.ndarray, vocabulary: Vocabulary, first: np.ndarray | None = None) -> Words:
    """Find the words of one text or of several texts.

    Args:
        tokens: Token ids, int64 [tokens].
        vocabulary: Properties of the token ids.
        first: Index of each text's first token, if `tokens` has several texts, int64 [texts]; None: a single text.
    """
    in_word = vocabulary.in_word[tokens]
    after_word = np.concatenate([[False], in_word[:-1]])[: len(tokens)]
    if first is not None:
        after_word[first[first < len(tokens)]] = False
    begins = in_word & (vocabulary.begins[tokens] | ~after_word)
    starts = np.flatnonzero(begins)
    # a word ends before the next word, or before a token that is not part of a word
    breaks = np.flatnonzero(begins | ~in_word)
    ends = np.append(breaks, len(tokens))[np.searchsorted(breaks, starts, side="right")]
    lengths = ends - starts
    if not len(starts):
        return Words(starts, lengths, np.zeros(0, dtype=np.uint64))
    parts = mix(tokens[ranges(starts, lengths)], ranges(0, lengths))
    hashes = mix(np.add.reduceat(parts, np.cumsum(lengths) - lengths), lengths)
    content = ~np.isin(hashes, vocabulary.stop)
    return Words(starts[content], lengths[content], hashes[content])


class WordModel:
    r"""Unigram language model of a doc with Dirichlet smoothing by the collection (Zhai and Lafferty, 2001).

    .. math:: P(w \mid D) = \frac{c(w, D) + \mu P(w \mid C)}{|D| + \mu}

    The collection's words are counted in `BUCKETS` counters (4 million). Words with the same hash share a counter.

    Args:
        store: The docs of the collection.
        vocabulary: Properties of the token ids.
        mu: Weight of the collection's probabilities, in words.
    """

    def __init__(self, store: TokenStore, vocabulary: Vocabulary, mu: float) -> None:
        self.mu = mu
        counts = np.zeros(BUCKETS, dtype=np.int64)
        row = 0
        while row < len(store):
            end = int(np.searchsorted(store.offsets, store.offsets[row] + TOKENS, side="right")) - 1
            end = min(max(end, row + 1), len(store))
            start = int(store.offsets[row])
            tokens = store.tokens[start : int(store.offsets[end])].astype(np.int64)
            found = words_of(tokens, vocabulary, store.offsets[row:end] - start)
            counts += np.bincount((found.hashes % np.uint64(BUCKETS)).astype(np.int64), minlength=BUCKETS)
            row = end
        self.shares = counts / max(1, int(counts.sum()))

    def likelihoods(self, hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return P(w | D) for each distinct word of a doc, float64 [words].

        Args:
            hashes: Hashes of the words [words].
            counts: How often each word occurs in the doc [words].
        """
        of_collection = self.shares[(hashes % np.uint64(BUCKETS)).astype(np.int64)]
        smoothed: np.ndarray = (counts + self.mu * of_collection) / (counts.sum() + self.mu)
        return smoothed
