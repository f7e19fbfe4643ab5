"""What a type of index is: conf/index/*.yaml; shared checks and defaults of the types."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from ranker.errors import ConfigError

Number = TypeVar("Number", bound=float | None)
TRAINED_PER_LIST = 64  # training vectors per centroid of k-means
FEW_PER_LIST = 39  # faiss warns if there are fewer training vectors per centroid


class IndexType(Protocol):
    """A type of index with its options: conf/index/*.yaml.

    Attributes:
        exact: Whether the query is compared with every vector.
        rescore: Number of vectors that are fetched for the exact comparison, as a multiple of the requested number.
        gpu: Whether to search on all GPUs; None: yes if faiss sees one.
    """

    exact: bool
    rescore: int
    gpu: bool | None

    def make(self, dim: int, num_vectors: int) -> Any:
        """Return an empty faiss index for inner products of vectors [num_vectors, dim]."""
        ...

    def train_vectors(self, num_vectors: int) -> int:
        """Return the number of vectors that the index is trained on; 0: it needs no training."""
        ...


def require(key: str, value: Number) -> Number:
    """Return a value that is None or at least 1.

    Raises:
        ConfigError: The value is below 1.
    """
    if value is not None and value < 1:
        raise ConfigError(f"{key}: expected at least 1, got {value}")
    return value


def num_lists(lists: int | None, num_vectors: int) -> int:
    """Return the number of inverted lists, at most `num_vectors`.

    Args:
        lists: The configured number; None: 4 times the square root of `num_vectors`, but at least `FEW_PER_LIST`
            vectors per list.
        num_vectors: Number of vectors.
    """
    default = max(1, min(int(4 * num_vectors**0.5), num_vectors // FEW_PER_LIST))
    return min(lists or default, max(1, num_vectors))
