"""Probing task: frequency of the query's words in the doc, relative to the doc's length, binned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranker.probing.examples import PairSample, ProbeExample, whole_text_example
from ranker.probing.words import content_stems


class TermFrequency:
    r"""Label each pair with the term frequency: a query word's share of the doc's words, averaged over the query words.

    .. math:: \mathrm{tf}(q, d) = \frac{1}{|q|} \sum_{t \in q} \frac{\mathrm{count}(t, d)}{|d|}

    Words are alphanumeric, without stop words, and stemmed (Porter); lengths count only these words. The label is 0 if
    query or doc has no such words.

    Args:
        legacy_case: Whether stop words are removed before lower-casing, so that capitalised stop words stay, as in the
            published labels.
        bins: Number of classes.
        binning: `mean2std`, `minmax` or `quantile`.
    """

    classes: tuple[str, ...] | None = ()
    whole_text = True
    ranks = False

    def __init__(self, legacy_case: bool = False, bins: int = 10, binning: str = "mean2std") -> None:
        self.legacy_case, self.bins, self.binning = legacy_case, bins, binning
        self.name = "tf_legacy_case" if legacy_case else "tf"
        self.labeller = f"tf-porter@1 legacy_case={legacy_case}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield each pair with one target, which has the whole query and the whole doc."""
        for pair in sample.texts():
            query, doc = (content_stems(text, self.legacy_case) for text in pair[2:])
            yield whole_text_example(pair, value=term_frequency(query, doc))


def term_frequency(query: list[str], doc: list[str]) -> float:
    """Return the mean over query words of (count in the doc / length of the doc); 0 if query or doc has no words.

    >>> term_frequency(["a", "b"], ["a", "a", "c", "b"])
    0.375
    """
    if not query or not doc:
        return 0.0
    counts = Counter(doc)
    return sum(counts[word] for word in query) / len(doc) / len(query)
