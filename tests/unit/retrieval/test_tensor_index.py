"""Exact search with torch: brute force, ties, several devices, vectors streamed from the disk, and what is refused."""

import numpy as np
import pytest
import torch

from ranker.errors import ConfigError, DataError
from ranker.files.folders import write_folder
from ranker.retrieval import tensor_index, vector_engine
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.tensor_index import TensorIndex
from ranker.retrieval.vector_engine import VectorEngine
from ranker.retrieval.vector_folder import Description, claim, shard_folder
from ranker.retrieval.vector_store import ShardWriter, VectorStore


def stored(folder, count=3000, dim=24, shard_docs=1100):
    """A folder of unit vectors, of which every tenth is equal to the first."""
    values = np.random.default_rng(0).normal(size=(count, dim))
    values[::10] = values[0]
    values = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    description = Description("scorer", "docs", count, "cosine", dim, False, "float32", "32-true", 30, shard_docs)
    claim(folder, description)
    for number, first in enumerate(range(0, count, shard_docs)):
        rows = np.arange(first, min(first + shard_docs, count))
        with write_folder(shard_folder(folder, number)) as part:
            ids = np.array([f"d{7 * row % 9973}".encode() for row in rows.tolist()])
            writer = ShardWriter(part, description, first, ids, np.ones(len(rows), dtype=np.int32))
            writer.vectors[:] = values[rows]
            writer.finish()
    return VectorStore(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("flat") / "vectors")


def queries_of(store, count=9):
    some = np.random.default_rng(1).normal(size=(count, store.description.dim)).astype(np.float32)
    some[0] = store.vectors_at(np.array([0]))[0]  # the equal vectors are its best
    return some / np.linalg.norm(some, axis=1, keepdims=True)


class Scorer:
    def divisor(self):
        return torch.tensor(0.05)


def rankings(store, index, queries, depth):
    return VectorEngine(Scorer(), None, store, index, None)._search_single(queries, depth)


def brute_force(store, queries, depth):
    """Rows and scores by float64 products, sorted by score, then by doc id, both descending."""
    values = store.vectors_at(np.arange(store.num_vectors)).astype(np.float64)
    for query in queries:
        scores = (values @ query.astype(np.float64) / float(torch.tensor(0.05))).astype(np.float32)
        order = np.lexsort((store.doc_ids, scores))[::-1][:depth]
        yield order.tolist(), scores[order].tolist()


DEVICES = [["cpu"], ["cpu"] * 3] + [
    pytest.param(["cuda"], marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
]


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("room", [None, 60_000, 0], ids=["resident", "some", "streamed"])
def test_ranking_and_ties_are_those_of_brute_force(store, devices, dtype, room, monkeypatch):
    monkeypatch.setattr(tensor_index, "PRODUCTS", 9 * 500)  # several blocks
    queries = queries_of(store)
    index = TensorIndex(store, Flat(), devices, dtype, room)
    for depth in (1, 17, 3000):  # 17 cuts through 300 equal docs
        found = [(rows.tolist(), scores.tolist()) for rows, scores in rankings(store, index, queries, depth)]
        assert found == list(brute_force(store, queries, depth))


def test_what_it_returns_are_the_best_by_its_own_products(store, monkeypatch):
    monkeypatch.setattr(tensor_index, "PRODUCTS", 9 * 1000)
    queries = queries_of(store)
    scores, indices = TensorIndex(store, Flat(), ["cpu", "cpu"], torch.float32).search(queries, 20)
    products = queries @ store.vectors_at(np.arange(3000)).T
    np.testing.assert_allclose(scores, -np.sort(-products, axis=1)[:, :20], atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(products, indices, 1), scores, atol=1e-6)
    assert [part.shape for part in TensorIndex(store, Flat(), ["cpu"]).search(queries[:0], 5)] == [(0, 5), (0, 5)]


def test_the_margin_covers_the_error_of_bfloat16(store):
    queries = queries_of(store)
    index = TensorIndex(store, Flat(), ["cpu"])
    scores, indices = index.search(queries, 3000)
    errors = np.abs(scores - index.exact(queries, indices))
    assert 1e-4 < errors.max() <= index.margin(queries[0]) < 0.01


def test_a_fault_of_the_first_comparison_is_seen(store, monkeypatch):
    """Without room for errors, bfloat16 alone gives another ranking, so the tests above test the margin."""
    queries = queries_of(store, 200)
    index = TensorIndex(store, Flat(), ["cpu"])
    index.rescore = 1
    monkeypatch.setattr(vector_engine, "SPARE", 1)
    monkeypatch.setattr(index, "margin", lambda query: -9.0)
    found = [rows.tolist() for rows, _ in rankings(store, index, queries, 10)]
    assert found != [rows for rows, _ in brute_force(store, queries, 10)]


def test_a_vector_that_is_not_finite_is_refused(tmp_path):
    store = stored(tmp_path / "vectors", 50)
    store._vectors[0] = np.array(store._vectors[0])
    store._vectors[0][30, 2] = np.inf
    with pytest.raises(DataError, match="got NaN or infinity for doc 'd210'"):
        TensorIndex(store, Flat(), ["cpu"])


def test_wrong_options():
    with pytest.raises(ConfigError, match=r"index.dtype: expected bfloat16 or float32, got 'float16'"):
        Flat(dtype="float16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_ranks_100_000_vectors_as_the_cpu(tmp_path):
    pytest.importorskip("faiss")
    store = stored(tmp_path / "vectors", 100_000, 96, 40_000)
    queries = queries_of(store, 64)
    ours = rankings(store, Flat().over(store), queries, 100)
    theirs = rankings(store, Flat(gpu=False).over(store), queries, 100)
    assert [part.tolist() for found in ours for part in found] == [part.tolist() for found in theirs for part in found]
