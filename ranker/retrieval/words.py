"""Split texts in any script into words for BM25: stop words are dropped, the rest is stemmed (see docs/data.md)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unicodedata import is_normalized, normalize

import regex

from ranker.errors import ConfigError

# Scripts without spaces between words. Hangul has spaces, but its particles are attached to words, so it is treated as
# in Lucene's CJKAnalyzer.
UNSPACED = ("Han", "Hiragana", "Katakana", "Hangul", "Thai", "Lao", "Khmer", "Myanmar")
_UNSPACED = "[" + "".join(rf"\p{{scx={script}}}" for script in UNSPACED) + "]"
# bm25s' names of English stop word lists; they lack "i", because bm25s' tokenizer never returns it
ENGLISH = ("english", "en", "english_plus", "en_plus")
# A single letter after an apostrophe, such as the s of "user's", is no word. The first branch has no group, so that
# such a letter matches as "".
_ASCII = re.compile(r"(?<=\w')\w\b|(\w+)")
# Unlike `re`, `regex` treats combining marks (Indic vowel signs) and joiners within a word as part of the word.
_ANY = regex.compile(rf"(?V1)(?<=\w['’])\w\b|([\w--{_UNSPACED}]+)|([\w&&{_UNSPACED}]+)")
_CHARACTERS = regex.compile(r"\X")


def import_bm25s() -> Any:
    """Import bm25s without JAX, and return it.

    Where JAX is installed, bm25s starts it, and JAX then reserves three quarters of the GPU's memory. bm25s would take
    the highest scores by it, which this package does itself.
    """
    jax = sys.modules.get("jax")
    sys.modules["jax"] = None  # type: ignore[assignment]  # an import of it now raises ImportError, which bm25s expects
    try:
        import bm25s
    finally:
        del sys.modules["jax"]
        if jax is not None:
            sys.modules["jax"] = jax
    return bm25s


class Words:
    """Split texts into words, drop stop words and stem the others.

    A word is a run of letters, marks, digits and underscores, in lower case and in Unicode's form NFKC. In scripts
    without spaces between words, a run becomes its overlapping pairs of characters and its single characters.

    Args:
        stemmer: Snowball stemmer by language; None: no stemming.
        stopwords: Stop word list of bm25s by language; None: no stop words.
        min_word_chars: Shorter words are dropped.
        bigrams: Whether runs of `UNSPACED` scripts become pairs and single characters; False keeps runs as words.

    Raises:
        ConfigError: An unknown stemmer or stop word list, or a length below 1.

    >>> Words()(["The user's vitamin C", "हिन्दी", "東京都2024"])
    [['user', 'vitamin', 'c'], ['हिन्दी'], ['東京', '京都', '東', '京', '都', '2024']]
    """

    def __init__(
        self,
        stemmer: str | None = "english",
        stopwords: str | None = "english",
        min_word_chars: int = 1,
        bigrams: bool = True,
    ) -> None:
        # imported here: data that comes with candidates does not need these packages
        import Stemmer

        tokenizer = import_bm25s().tokenization.Tokenizer
        if stemmer is not None and stemmer not in Stemmer.algorithms():
            raise ConfigError(
                f"bm25.stemmer: expected one of {', '.join(Stemmer.algorithms())} or null, got {stemmer!r}; "
                "set one of these"
            )
        if min_word_chars < 1:
            raise ConfigError(f"bm25.min_word_chars: expected at least 1, got {min_word_chars}; raise it")
        try:
            stopword_list = tokenizer(stopwords=stopwords or []).stopwords
        except ValueError as error:
            raise ConfigError(
                f"bm25.stopwords: expected a language that bm25s has stop words for or null, got {stopwords!r}; "
                "set another"
            ) from error
        self._stopwords = frozenset((*stopword_list, *(["i"] if stopwords in ENGLISH else [])))
        self._stem = None if stemmer is None else Stemmer.Stemmer(stemmer).stemWord
        self._min_word_chars, self._bigrams = min_word_chars, bigrams

    def __call__(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the stems of each text, in order.

        Snowball stemmers are not thread-safe: call this from one thread at a time.
        """
        stems: dict[str, str] = {}  # word -> stem, or "" for a stop word
        split = []
        for text in texts:
            words = self._split(text)
            for word in words:
                if word not in stems:
                    stems[word] = "" if word in self._stopwords else word if self._stem is None else self._stem(word)
            split.append([stem for word in words if (stem := stems[word])])
        return split

    def _split(self, text: str) -> list[str]:
        if text.isascii():
            words = _ASCII.findall(text.lower())
        else:
            text = (text if is_normalized("NFKC", text) else normalize("NFKC", text)).lower()
            words = []
            for spaced, run in _ANY.findall(text):
                words += self._pieces(run) if run and self._bigrams else [spaced or run]
        return [word for word in words if len(word) >= self._min_word_chars] if self._min_word_chars > 1 else words

    def _pieces(self, run: str) -> list[str]:
        """Return the overlapping pairs of characters (letters with their marks), then the single characters."""
        characters = _CHARACTERS.findall(run)
        singles = characters if self._min_word_chars == 1 else []
        return [first + second for first, second in pairwise(characters)] + singles
