"""TF-IDF weights of the words of docs, with the interface of bm25s' index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import sparse

from ranker.retrieval.postings import Postings


class TFIDFWeights:
    r"""Weights :math:`(1 + \log f_{td}) \log(N / n_t)` of words t in docs d, searched by postings.

    Args:
        offsets: Doc r has the words `flat[offsets[r]:offsets[r + 1]]`, int64 [docs + 1].
        flat: Word ids of all docs, int32 [words of all docs].
        vocabulary: The id of each word.

    Attributes:
        scores: The arrays of the index by name.
    """

    def __init__(self, offsets: np.ndarray, flat: np.ndarray, vocabulary: Mapping[str, int]) -> None:
        num_docs = len(offsets) - 1
        counts = sparse.csr_matrix((np.ones(len(flat)), flat, offsets), shape=(num_docs, len(vocabulary)))
        counts.sum_duplicates()
        inverse = np.log(num_docs / np.bincount(counts.indices, minlength=len(vocabulary)).clip(min=1))
        weights = (1 + np.log(counts.data)) * inverse[counts.indices]
        self._vocabulary = vocabulary
        self._postings = Postings.of(sparse.csr_matrix((weights, counts.indices, counts.indptr), counts.shape), False)
        self.scores = {name: getattr(self._postings, name) for name in ("starts", "rows", "impacts")}

    def get_scores(self, words: Sequence[str]) -> np.ndarray:
        """Return the sum of the weights of a query's words in each doc, float32 [docs]."""
        counts = Counter(self._vocabulary[word] for word in words if word in self._vocabulary)
        ids = np.array(sorted(counts), dtype=np.int64)
        return self._postings.scores(ids, np.array([counts[word] for word in ids.tolist()], dtype=np.float32))
