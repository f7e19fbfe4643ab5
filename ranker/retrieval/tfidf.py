"""TF-IDF: a first stage beside BM25."""

from __future__ import annotations

from ranker.data.collection import Docs
from ranker.retrieval.bm25 import BM25


class TFIDF(BM25):
    r"""TF-IDF over title and text, without a normalisation by the length of docs.

    .. math:: s(q, d) = \sum_{t \in q} (1 + \log f_{td}) \log \frac{N}{n_t}

    Source: Salton and Buckley, 1988 (logarithmic term frequency, inverse document frequency).

    Args:
        docs: The corpus; only the index stays in memory.
        stemmer: As in BM25.
        stopwords: As in BM25.
        min_word_chars: As in BM25.
        bigrams: As in BM25.
        threads: As in BM25.
    """

    def __init__(
        self,
        docs: Docs,
        stemmer: str | None = "english",
        stopwords: str | None = "english",
        min_word_chars: int = 1,
        bigrams: bool = True,
        threads: int = 1,
    ) -> None:
        super().__init__(
            docs,
            stemmer=stemmer,
            stopwords=stopwords,
            min_word_chars=min_word_chars,
            bigrams=bigrams,
            threads=threads,
            variant="tfidf",
        )
