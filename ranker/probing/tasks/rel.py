"""Probing task: is the doc relevant to the query? The labels come from the judgements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ranker.errors import DataError
from ranker.probing.examples import PairSample, ProbeExample, whole_text_example


class Relevance:
    """Label each pair by its judgement: 1 if the grade reaches the collection's relevance threshold, else 0.

    In train and val, the docs of a query are its relevant docs, and candidates that are unjudged or not relevant. In
    test, the docs of a query are its first `pool` candidates of the first stage, so that MAP, MRR, nDCG and P measure a
    re-ranking.

    Args:
        pool: Number of candidates of each test query.
        negatives: In train and val: number of candidates that are not relevant, per relevant doc.
    """

    name = "rel"
    classes: tuple[str, ...] | None = ("0", "1")
    whole_text = True
    ranks = True

    def __init__(self, pool: int = 20, negatives: int = 1) -> None:
        self.pool, self.negatives = pool, negatives
        self.labeller = f"qrels@1 pool={pool} negatives={negatives}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield pairs with one target: the whole query and the whole doc. Train and val have at most `max_pairs` pairs.

        Raises:
            DataError: The collection has no judgements or no candidates.
        """
        collection = sample.collection
        if not collection.qrels or collection.candidates is None:
            raise DataError(
                f"probe.rel: expected judgements and candidates, got none in {collection.name}; "
                "take another data or split"
            )
        num_pairs = 0  # number of pairs in train and val
        for number, query_id in enumerate(sample.parts):
            part = sample.parts[query_id]
            judged = collection.qrels.get(query_id, {})
            relevant = [
                doc_id
                for doc_id, grade in judged.items()
                if grade >= collection.relevance and doc_id in collection.docs
            ]
            candidates = collection.candidates[query_id][: self.pool if part == "test" else sample.depth]
            if not judged or not candidates or (part != "test" and num_pairs >= sample.max_pairs):
                continue
            if part == "test":
                chosen = candidates
            else:
                others = [doc_id for doc_id in candidates if doc_id not in relevant]
                relevant = relevant[: max(1, sample.docs_per_query // (1 + self.negatives))]
                rng = np.random.default_rng([sample.seed, number])
                drawn = rng.permutation(len(others))[: len(relevant) * self.negatives]
                chosen = [*relevant, *(others[i] for i in drawn)]
                num_pairs += len(chosen)
            for doc_id in chosen:
                texts = (query_id, doc_id, collection.queries[query_id], collection.docs[doc_id].full_text)
                example = whole_text_example(texts, label="1" if judged.get(doc_id, 0) >= collection.relevance else "0")
                yield ProbeExample(example.query_id, example.doc_id, example.query, example.doc, example.targets, part)
