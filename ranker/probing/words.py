"""Split texts into words, from which labels are computed: tokenizers, a stop word list, Porter's stemmer."""

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
    """Return the words of a search engine's standard analyser: in lower case, with stop words, without stemming.

    >>> standard_words("Don't read example.com's v3.5, or C++!")
    ["don't", 'read', "example.com's", 'v3.5', 'or', 'c']
    """
    return _STANDARD.findall(text.lower())


def content_stems(text: str, legacy_case: bool = False) -> list[str]:
    """Return the Porter stems of the alphanumeric words that are not stop words.

    Args:
        text: The text.
        legacy_case: Whether stop words are removed before lower-casing, so that capitalised stop words stay, as in the
            published labels.

    >>> content_stems("The servers were serving 3 files."), content_stems("The servers", legacy_case=True)
    (['server', 'serv', '3', 'file'], ['the', 'server'])
    """
    words = re.findall(r"[^\W_]+", text if legacy_case else text.lower())
    return _stem([word.lower() for word in words if word not in STOP_WORDS])


def _stem(words: list[str]) -> list[str]:
    import Stemmer  # of the package PyStemmer; each call makes a new stemmer, because stemmers are not thread-safe

    return Stemmer.Stemmer("porter").stemWords(words)


def content_pieces(text: str) -> list[str]:
    """Return the lower-case words without stop words, and the punctuation marks.

    >>> content_pieces("Is it a bird?")
    ['bird', '?']
    """
    return [word for word in _PIECES.findall(text.lower()) if word not in STOP_WORDS]


def first_content_word(text: str) -> str:
    """Return in lower case the first word that is not a stop word, else the first word; empty if there are no words.

    >>> first_content_word("What is the Java sandbox?")
    'java'
    """
    words = re.findall(r"[^\W_]+", text.lower())
    return next((word for word in words if word not in STOP_WORDS), words[0] if words else "")


ANALYZERS: dict[str, Callable[[str], list[str]]] = {"standard": standard_words, "stemmed": content_stems}


def analyzer(name: str, key: str) -> Callable[[str], list[str]]:
    """Return an analyser by name: a function from a text to its words.

    Args:
        name: Name of the analyser.
        key: Configuration key of the name, for the error message.

    Raises:
        ConfigError: There is no such analyser.
    """
    if name not in ANALYZERS:
        raise ConfigError(f"{key}: expected one of {', '.join(ANALYZERS)}; got {name!r}")
    return ANALYZERS[name]
