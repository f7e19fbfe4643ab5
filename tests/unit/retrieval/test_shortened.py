"""Stored vectors cut to their first numbers: values, lengths, sizes."""

import numpy as np
import pytest

from ranker.retrieval.shortened import Shortened
from ranker.retrieval.vector_folder import Description, claim, shard_folder
from ranker.retrieval.vector_store import ShardWriter, VectorStore


def stored(folder, values, similarity):
    """A folder of vectors, one per doc."""
    about = Description("s", "d", len(values), similarity, values.shape[1], False, "float32", "32-true", 8, 10)
    claim(folder, about)
    shard_folder(folder, 0).mkdir()
    ids = np.array([f"d{i}".encode() for i in range(len(values))])
    writer = ShardWriter(shard_folder(folder, 0), about, 0, ids, np.ones(len(values), dtype=np.int32))
    writer.vectors[:] = values
    writer.finish()
    return VectorStore(folder)


@pytest.mark.parametrize(("similarity", "first"), [("cosine", [[0.6, 0.8], [0.0, 1.0]]), ("dot", [[3, 4], [0, 2]])])
def test_the_first_numbers_at_length_one_for_the_cosine(tmp_path, similarity, first):
    short = Shortened(stored(tmp_path, np.array([[3.0, 4.0, 5.0], [0.0, 2.0, 7.0]]), similarity), 2)
    assert (short.description.dim, short.num_vectors, short.num_docs, short.num_bytes) == (2, 2, 2, 16)
    (chunk,) = short.chunks()
    np.testing.assert_allclose(chunk, first, rtol=1e-6)
    np.testing.assert_allclose(short.take(np.array([1])).values, first[1:], rtol=1e-6)
    np.testing.assert_allclose(short.sample(5), first, rtol=1e-6)
    np.testing.assert_allclose(next(iter(short.between(1, 2))), first[1:], rtol=1e-6)
