"""Probing task: the TF-IDF score of query and doc, binned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ranker.probing.collection_statistics import CollectionStatistics, queries_and_statistics
from ranker.probing.examples import PairSample, ProbeExample, whole_text_example
from ranker.probing.words import analyzer


class TFIDFScore:
    r"""Label each pair with its TF-IDF score, which is that of `model=tfidf` (Salton and Buckley, 1988).

    .. math:: s(q, d) = \sum_{t \in q} (1 + \ln f_{td}) \ln \frac{N}{n_t}

    A repeated query word counts each time. Statistics are computed over the whole collection. In contrast to BM25, the
    score does not depend on the length of the doc.

    Args:
        analyzer: `standard` (lower-case words) or `stemmed` (without stop words, Porter stems).
        bins: Number of classes.
        binning: `mean2std`, `minmax` or `quantile`.
    """

    classes: tuple[str, ...] | None = ()
    whole_text = True
    ranks = False

    def __init__(self, analyzer: str = "standard", bins: int = 10, binning: str = "mean2std") -> None:
        self.analyzer, self.bins, self.binning = analyzer, bins, binning
        self.name = "tfidf" if analyzer == "standard" else f"tfidf_{analyzer}"
        self.labeller = f"tfidf-formula@1 analyzer={analyzer}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield each pair with one target, which has the whole query and the whole doc."""
        words_of = analyzer(self.analyzer, "probe.tfidf.analyzer")
        queries, statistics = queries_and_statistics(sample, words_of)
        for pair in sample.texts():
            yield whole_text_example(pair, value=tfidf(queries[pair[0]], words_of(pair[3]), statistics))


def tfidf(query: list[str], doc: list[str], statistics: CollectionStatistics) -> float:
    """Return the TF-IDF score of a query and a doc, which are lists of words.

    >>> docs = [["cat", "sat"], ["cat", "cat", "dog", "ran"], ["bird"]]
    >>> round(tfidf(["cat", "dog"], docs[1], CollectionStatistics.of(docs, {"cat", "dog"})), 6)
    1.785124
    """
    counts = Counter(doc)
    found = (word for word in query if counts[word])
    weights = (
        (1 + math.log(counts[word])) * math.log(statistics.num_docs / statistics.doc_frequency[word]) for word in found
    )
    return sum(weights, start=0.0)
