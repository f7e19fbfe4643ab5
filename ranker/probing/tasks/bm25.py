"""Probing task: the BM25 score of query and doc, binned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ranker.probing.collection_statistics import CollectionStatistics, queries_and_statistics
from ranker.probing.examples import PairSample, ProbeExample, whole_text_example
from ranker.probing.words import analyzer


class BM25Score:
    r"""Label each pair with its BM25 score (Robertson et al., 1994), as in Elasticsearch 7, but with exact doc lengths.

    .. math:: s(q, d) = \sum_{t \in q} (k_1 + 1) \ln\left(1 + \frac{N - n_t + 0.5}{n_t + 0.5}\right)
              \frac{f_{td}}{f_{td} + k_1 (1 - b + b |d| / \bar{|d|})}

    A repeated query word counts each time. Statistics are computed over the whole collection.

    Args:
        k1: Term frequency saturation; higher values saturate more slowly.
        b: Strength of length normalisation, 0 to 1.
        keep_k1_plus_1: Whether the score has the constant factor k1 + 1 of Elasticsearch 7, which does not change the
            bins.
        analyzer: `standard` (lower-case words) or `stemmed` (without stop words, Porter stems).
        bins: Number of classes.
        binning: `mean2std`, `minmax` or `quantile`.
    """

    name = "bm25"
    classes: tuple[str, ...] | None = ()
    whole_text = True
    ranks = False

    def __init__(
        self,
        k1: float = 1.2,
        b: float = 0.75,
        keep_k1_plus_1: bool = True,
        analyzer: str = "standard",
        bins: int = 10,
        binning: str = "mean2std",
    ) -> None:
        self.k1, self.b, self.keep_k1_plus_1, self.analyzer = k1, b, keep_k1_plus_1, analyzer
        self.bins, self.binning = bins, binning
        self.name = (
            "bm25"
            + ("" if analyzer == "standard" else f"_{analyzer}")
            + ("" if (k1, b) == (1.2, 0.75) else f"_k1_{k1}_b_{b}")
        )
        self.labeller = f"bm25-formula@1 k1={k1} b={b} keep_k1_plus_1={keep_k1_plus_1} analyzer={analyzer}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield each pair with one target, which has the whole query and the whole doc."""
        words_of = analyzer(self.analyzer, "probe.bm25.analyzer")
        queries, statistics = queries_and_statistics(sample, words_of)
        for pair in sample.texts():
            score = self.score(queries[pair[0]], words_of(pair[3]), statistics)
            yield whole_text_example(pair, value=score)

    def score(self, query: list[str], doc: list[str], statistics: CollectionStatistics) -> float:
        """Return the BM25 score of a query and a doc, which are lists of words."""
        counts = Counter(doc)
        saturation = self.k1 * (1 - self.b + self.b * len(doc) / statistics.mean_length) if doc else 1.0
        total = sum(
            idf(word, statistics) * counts[word] / (counts[word] + saturation) for word in query if counts[word]
        )
        return total * (self.k1 + 1) if self.keep_k1_plus_1 else total


def idf(word: str, statistics: CollectionStatistics) -> float:
    """Return ln(1 + (N - n + 0.5) / (n + 0.5)) for N docs, of which n contain the word."""
    frequency = statistics.doc_frequency[word]
    return math.log(1 + (statistics.num_docs - frequency + 0.5) / (frequency + 0.5))
