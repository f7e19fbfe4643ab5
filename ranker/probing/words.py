"""Words of a text for computing labels: word tokenizers, a stop word list, Porter's stemmer."""

from __future__ import annotations

import re
from collections.abc import Callable

from ranker.data.stop_words import STOP_WORDS
from ranker.errors import ConfigError

# As in Unicode's word boundaries (UAX 29), which Lucene's standard tokenizer follows, a word continues over ' . :
# between letters and over . , ' between digits.
_STANDARD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:](?=[^\W\d_])|(?<=\d)[.,'’](?=\d))\w+)*")
_PIECES = re.compile(r"\w+|[^\w\s]")


def standard_words(text: str) -> list[str]:
    """Lower-case words as in a search engine's standard analyser, with stop words and without stemming.

    >>> standard_words("Don't read example.com's v3.5, or C++!")
    ["don't", 'read', "example.com's", 'v3.5', 'or', 'c']
    """
    return _STANDARD.findall(text.lower())


def content_stems(text: str, legacy_case: bool = False) -> list[str]:
    """Porter stems of the alphanumeric words that are not stop words.

    Args:
        text: The text.
        legacy_case: Remove stop words before lower-casing, so that capitalised ones stay, as in the published labels.

    >>> content_stems("The servers were serving 3 files."), content_stems("The servers", legacy_case=True)
    (['server', 'serv', '3', 'file'], ['the', 'server'])
    """
    words = re.findall(r"[^\W_]+", text if legacy_case else text.lower())
    return _stem([word.lower() for word in words if word not in STOP_WORDS])


def _stem(words: list[str]) -> list[str]:
    import Stemmer  # from PyStemmer; stemmers are not thread-safe, so each call makes a new one

    return Stemmer.Stemmer("porter").stemWords(words)


def content_pieces(text: str) -> list[str]:
    """Lower-case words without stop words, and punctuation marks.

    >>> content_pieces("Is it a bird?")
    ['bird', '?']
    """
    return [word for word in _PIECES.findall(text.lower()) if word not in STOP_WORDS]


def first_content_word(text: str) -> str:
    """The first word that is not a stop word, or else the first word, in lower case; empty without words.

    >>> first_content_word("What is the Java sandbox?")
    'java'
    """
    words = re.findall(r"[^\W_]+", text.lower())
    return next((word for word in words if word not in STOP_WORDS), words[0] if words else "")


ANALYZERS: dict[str, Callable[[str], list[str]]] = {"standard": standard_words, "stemmed": content_stems}


def analyzer(name: str, key: str) -> Callable[[str], list[str]]:
    """Look up an analyser, a function from a text to its words.

    Args:
        name: Name of the analyser.
        key: Configuration key of the name, for the error message.

    Raises:
        ConfigError: There is no such analyser.
    """
    if name not in ANALYZERS:
        raise ConfigError(f"{key}: expected one of {', '.join(ANALYZERS)}; got {name!r}")
    return ANALYZERS[name]
