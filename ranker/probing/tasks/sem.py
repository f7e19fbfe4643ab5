"""Probing task: the semantic similarity of query and doc, computed from word vectors and binned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ranker.errors import ConfigError
from ranker.probing.examples import PairSample, ProbeExample, file_fingerprint, whole_text_example
from ranker.probing.word_vectors import WordVectors, cosine_of_means, mean_pairwise_cosine, ppmi_svd, read_vectors
from ranker.probing.words import content_pieces

SIMILARITIES = {"mean_cos": mean_pairwise_cosine, "mean_vec": cosine_of_means}


class SemanticSimilarity:
    """Label each pair with the similarity of the word vectors of query and doc.

    Words are in lower case, without stop words; punctuation marks are words. An unknown word has the mean of all
    vectors. The vectors are computed from the collection (positive PMI + SVD, task `sem_svd`), or read from a file in
    GloVe's format (task `sem_FILE`).

    Args:
        vectors: File of word vectors; None: vectors are computed from the collection.
        similarity: `mean_cos`, the mean cosine over all pairs of words, or `mean_vec`, the cosine of the mean vectors.
        dim: Size of computed vectors.
        window: For computed vectors: number of words on each side that are neighbours of a word.
        min_count: For computed vectors: minimum count of a word that gets a vector.
        bins: Number of classes.
        binning: `mean2std`, `minmax` or `quantile`.

    Raises:
        ConfigError: An unknown `similarity`.
    """

    classes: tuple[str, ...] | None = ()
    whole_text = True
    ranks = False

    def __init__(
        self,
        vectors: str | Path | None = None,
        similarity: str = "mean_cos",
        dim: int = 100,
        window: int = 5,
        min_count: int = 3,
        bins: int = 10,
        binning: str = "mean2std",
    ) -> None:
        if similarity not in SIMILARITIES:
            raise ConfigError(f"probe.sem.similarity: expected one of {', '.join(SIMILARITIES)}; got {similarity!r}")
        self.vectors = None if vectors is None else Path(vectors).expanduser()
        self.similarity, self.dim, self.window, self.min_count = similarity, dim, window, min_count
        self.bins, self.binning = bins, binning
        source = "svd" if self.vectors is None else "_".join(re.findall(r"\w+", self.vectors.stem))
        self.name = f"sem_{source}" + ("" if similarity == "mean_cos" else f"_{similarity}")

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id, version and settings, with a hash of the file of vectors."""
        if self.vectors is None:
            source = f"ppmi-svd@1 dim={self.dim} window={self.window} min_count={self.min_count}"
        else:
            source = f"vectors {file_fingerprint(self.vectors) if self.vectors.is_file() else 'missing'}"
        return f"sem@1 similarity={self.similarity} {source}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield each pair with one target, which has the whole query and the whole doc.

        Raises:
            TaskUnavailable: The file of vectors does not exist.
            DataError: A line of the file is malformed, or too few words have a vector.
        """
        vectors = self._vectors(sample)
        similarity = SIMILARITIES[self.similarity]
        for pair in sample.texts():
            query, doc = (vectors.of(content_pieces(text)) for text in pair[2:])
            yield whole_text_example(pair, value=similarity(doc, query))

    def _vectors(self, sample: PairSample) -> WordVectors:
        if self.vectors is None:
            words = (content_pieces(doc.full_text) for doc in sample.collection.docs)
            return ppmi_svd(words, self.dim, self.window, self.min_count, seed=sample.seed)
        wanted = {
            word for _, _, query, doc in sample.texts() for word in (*content_pieces(query), *content_pieces(doc))
        }
        return read_vectors(self.vectors, wanted)
