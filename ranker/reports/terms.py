"""Find the words of documents that match a query, by the default rule of BM25: stemmed, without stop words."""

from __future__ import annotations

from collections.abc import Iterable

import regex

from ranker.retrieval.words import UNSPACED, Words

_TOKEN = regex.compile(r"[\p{L}\p{M}\p{N}_]+")
_UNSPACED = regex.compile("[" + "".join(rf"\p{{scx={script}}}" for script in UNSPACED) + "]")


class Terms:
    """Finds the words of documents that match a query; each different word is stemmed once."""

    def __init__(self) -> None:
        self._words = Words()
        self._stems: dict[str, frozenset[str]] = {}

    def of(self, query: str, texts: Iterable[str]) -> list[str]:
        """Return the words of the texts whose stem is a stem of the query, in lower case and sorted.

        In scripts without spaces between words, the result has pairs of characters of the query that occur in the
        texts.

        >>> Terms().of("the gains of 東京都", ["It gained more, GAINING", "in 東京"])
        ['gained', 'gaining', '東京']
        """
        stems = frozenset(self._words([query])[0])
        spelt = {token for text in texts for token in _TOKEN.findall(text.lower())}
        new = [token for token in spelt if token not in self._stems]
        self._stems |= zip(new, map(frozenset, self._words(new)), strict=True)
        found = {token for token in spelt if not stems.isdisjoint(self._stems[token]) and not _UNSPACED.search(token)}
        runs = [token for token in spelt if _UNSPACED.search(token)]
        pairs = [stem for stem in stems if len(stem) > 1 and _UNSPACED.search(stem)]
        found.update(pair for pair in pairs if any(pair in run for run in runs))
        return sorted(found)
