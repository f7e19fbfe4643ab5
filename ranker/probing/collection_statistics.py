"""Count words over a collection's docs, for labels that depend on these counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ranker.probing.examples import PairSample


class CollectionStatistics:
    """Document frequencies of some words, and the mean length of docs.

    Args:
        num_docs: Number of docs in the collection.
        mean_length: Mean length of the docs in words.
        doc_frequency: word -> number of docs that contain it
    """

    def __init__(self, num_docs: int, mean_length: float, doc_frequency: Counter[str]) -> None:
        self.num_docs, self.mean_length, self.doc_frequency = num_docs, mean_length, doc_frequency

    @classmethod
    def of(cls, docs: Iterable[list[str]], wanted: set[str]) -> CollectionStatistics:
        """Count in one pass. Only wanted words are counted, so that memory does not grow with the collection."""
        counts: Counter[str] = Counter()
        num_docs = total = 0
        for words in docs:
            num_docs, total = num_docs + 1, total + len(words)
            counts.update(wanted.intersection(words))
        return cls(num_docs, total / num_docs if num_docs else 0.0, counts)


def queries_and_statistics(
    sample: PairSample, words_of: Callable[[str], list[str]]
) -> tuple[dict[str, list[str]], CollectionStatistics]:
    """Return the words of each query in a sample, and these words' statistics in the sample's collection.

    Args:
        sample: The sample.
        words_of: Divides a text into words.
    """
    queries = {query_id: words_of(sample.collection.queries[query_id]) for query_id, _ in sample.pairs}
    wanted = {word for words in queries.values() for word in words}
    return queries, CollectionStatistics.of((words_of(doc.full_text) for doc in sample.collection.docs), wanted)
