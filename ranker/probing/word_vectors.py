"""Word vectors: computed from a collection (positive PMI + SVD), or read from a file in GloVe's format."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from ranker.data.corpus_files import read_lines
from ranker.data.parsing import shown
from ranker.errors import DataError
from ranker.probing.examples import TaskUnavailable

log = logging.getLogger(__name__)


class WordVectors:
    """Word vectors; an unknown word has the mean of all vectors.

    Args:
        words: The vocabulary.
        vectors: float [words, dim]

    Attributes:
        vectors: Vectors of the vocabulary, and in the last row the vector of unknown words, float64 [words + 1, dim].
    """

    def __init__(self, words: list[str], vectors: np.ndarray) -> None:
        self._index = {word: i for i, word in enumerate(words)}
        self.vectors = np.vstack([vectors, vectors.mean(axis=0, keepdims=True)]).astype(np.float64)

    def __len__(self) -> int:
        return len(self._index)

    def of(self, words: list[str]) -> np.ndarray:
        """Return the vectors of words, float64 [words, dim]."""
        return self.vectors[[self._index.get(word, -1) for word in words]]


def mean_pairwise_cosine(doc: np.ndarray, query: np.ndarray) -> float:
    """Return the mean cosine over all pairs of a doc word and a query word; 0 if query or doc has no words.

    The mean is computed as the dot product of the mean unit vectors, in time linear in the lengths.

    Args:
        doc: [words, dim]
        query: [words, dim]

    >>> mean_pairwise_cosine(np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([[3.0, 0.0]]))
    0.5
    """
    if not len(doc) or not len(query):
        return 0.0
    return float(unit(doc).mean(axis=0) @ unit(query).mean(axis=0))


def cosine_of_means(doc: np.ndarray, query: np.ndarray) -> float:
    """Return the cosine of the mean vectors of doc [words, dim] and query [words, dim]; 0 if one has no words."""
    if not len(doc) or not len(query):
        return 0.0
    return float(unit(doc.mean(axis=0)) @ unit(query.mean(axis=0)))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors [..., dim] to length 1; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def read_vectors(path: Path, wanted: set[str]) -> WordVectors:
    """Read a text file of `word number number ...` lines.

    The first line decides how many numbers each line has at its end. The text before the numbers is the word, which may
    contain spaces, as in glove.840B.

    Args:
        path: The file, plain or gzipped.
        wanted: Words to keep. An unknown word gets the mean over all lines of the file.

    Raises:
        TaskUnavailable: The file does not exist.
        DataError: A line has more or fewer numbers than the first line, or no wanted word has a vector.
    """
    if not path.is_file():
        raise TaskUnavailable(
            f"probe.sem.vectors: expected a file of word vectors in GloVe's layout, got {str(path)!r}, which is no file"
        )
    words: list[str] = []
    rows: list[np.ndarray] = []
    total: np.ndarray | None = None
    lines = 0
    for number, line in read_lines(path):
        word, *numbers = line.rstrip(" ").rsplit(" ", -1 if total is None else len(total))
        if number == 1 and len(numbers) == 1:  # the header of word2vec's format: number of words, and dim
            continue
        try:
            with np.errstate(over="ignore"):
                row = np.array(numbers, dtype=np.float32)
        except ValueError as error:
            raise DataError(f"{path}:{number}: expected a word and numbers, got {shown(line)}; fix the line") from error
        if not len(row) or not np.isfinite(row).all():
            raise DataError(f"{path}:{number}: expected a word and finite numbers, got {shown(line)}; fix the line")
        if total is not None and (len(row) != len(total) or _is_number(word.rpartition(" ")[2] if " " in word else "")):
            got = len(line.split()) - 1
            raise DataError(
                f"{path}:{number}: expected {len(total)} numbers as in the first line, got {got}; fix the line"
            )
        total = row.astype(np.float64) if total is None else total + row
        lines += 1
        if word in wanted:
            words.append(word)
            rows.append(row)
    if total is None or not rows:
        raise DataError(f"{path}: expected vectors of words that occur in the pairs, got none; take another file")
    log.info("%s: vectors for %d of %d words", path, len(words), len(wanted))
    vectors = WordVectors(words, np.stack(rows))
    vectors.vectors[-1] = total / lines
    return vectors


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def ppmi_svd(
    docs: Iterable[list[str]],
    dim: int = 100,
    window: int = 5,
    min_count: int = 3,
    max_words: int = 30_000,
    max_docs: int = 200_000,
    seed: int = 0,
) -> WordVectors:
    """Compute vectors by positive pointwise mutual information and truncated SVD (Levy, Goldberg and Dagan, TACL 2015).

    Args:
        docs: Words of each doc.
        dim: Size of a vector; a small vocabulary gives smaller vectors.
        window: Number of words on each side that are neighbours of a word.
        min_count: Minimum count of a word in the vocabulary.
        max_words: Maximum size of the vocabulary; the most frequent words are kept.
        max_docs: Maximum number of docs that are read.
        seed: Seed of the start vector of the decomposition.

    Raises:
        DataError: Fewer than 3 words occur at least `min_count` times.
    """
    from scipy.sparse import coo_matrix, csr_matrix, diags
    from scipy.sparse.linalg import svds

    texts = list(islice(docs, max_docs))
    counts = Counter(word for words in texts for word in words)
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word)
    )
    vocabulary = ranked[:max_words]
    if len(vocabulary) < 3:
        raise DataError(
            f"probe.sem: expected at least 3 words that occur {min_count} times, got {len(vocabulary)}; "
            "lower probe.sem.min_count"
        )
    index = {word: i for i, word in enumerate(vocabulary)}
    size = len(vocabulary)
    pairs = csr_matrix((size, size))
    for rows, columns in _neighbours(texts, index, window):
        part = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, size)).tocsr()
        pairs = pairs + part + part.T
    sums = np.maximum(np.asarray(pairs.sum(axis=1)).ravel(), 1.0)
    scaled = (diags(pairs.sum() / sums) @ pairs @ diags(1.0 / sums)).tocsr()
    scaled.data = np.maximum(np.log(scaled.data), 0.0)
    scaled.eliminate_zeros()
    rank = min(dim, size - 1)
    left, singular, _ = svds(scaled, k=rank, v0=np.random.default_rng(seed).standard_normal(size))
    return WordVectors(vocabulary, left * np.sqrt(singular))


def _neighbours(
    texts: list[list[str]], index: dict[str, int], window: int, chunk_docs: int = 2_000
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of words that are at most `window` words apart in a doc: indices of the first and second words."""
    for first in range(0, len(texts), chunk_docs):
        chunk = texts[first : first + chunk_docs]
        flat = np.array([index.get(word, -1) for words in chunk for word in words], dtype=np.int64)
        doc = np.repeat(np.arange(len(chunk)), [len(words) for words in chunk])
        for gap in range(1, window + 1):
            together = (doc[gap:] == doc[:-gap]) & (flat[gap:] >= 0) & (flat[:-gap] >= 0)
            yield flat[:-gap][together], flat[gap:][together]
