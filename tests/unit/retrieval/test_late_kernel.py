"""The search of a GPU in Triton's interpreter: scores of all docs by their centroids, for a batch of queries."""

import os

import numpy as np
import pytest
import torch

from ranker.interactions.maxsim import TextVectors
from ranker.retrieval.late.arrays import Arrays, Effort
from ranker.retrieval.late.centroids import Centroids
from ranker.retrieval.late.residuals import Buckets
from ranker.retrieval.late.tensor_search import TensorSearch
from tests.assets.interpreter import run_interpreted

triton = pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")

# Triton reads the variable when it is imported, so these tests run in a process of their own
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IN_INTERPRETER, reason="test_in_the_interpreter runs it in another process")


@pytest.mark.skipif(IN_INTERPRETER, reason="this is that process")
def test_in_the_interpreter():
    assert "3 passed" in run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("tokens", [4, 32])
def test_docs_are_scored_as_by_a_plain_loop(tokens):
    from ranker.interactions.kernels.code_scores import code_scores

    rng = np.random.default_rng(0)
    counts = np.array([3, 0, 1, 600, 64, 65, 2, 9, 5, 130, 1])  # several programs and blocks
    table = rng.integers(0, 256, size=(3, 20, tokens)).astype(np.uint8)
    codes = rng.integers(0, 20, size=counts.sum()).astype(np.int32)
    codes[:1] = 19
    starts = np.concatenate([[0], np.cumsum(counts)])
    found = code_scores(torch.from_numpy(table), torch.from_numpy(codes), torch.from_numpy(starts))
    for query in range(3):
        for doc in range(len(counts)):
            own = codes[starts[doc] : starts[doc + 1]]
            assert found[query, doc] == (table[query][own].max(0).astype(int).sum() if len(own) else 0)


@interpreted
def test_the_candidates_of_a_batch_are_the_best_by_their_centroids():
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, size=50)
    values = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(16, 8)).astype(np.float32)), dim=1)
    codes = rng.integers(0, 16, size=counts.sum()).astype(np.uint16)
    weights = torch.tensor([-0.1, 0.0, 0.0, 0.1])
    arrays = Arrays(
        Centroids(values, values[:1], torch.tensor([0, 16])), Buckets(torch.tensor([-0.05, 0.0, 0.05]), weights), codes,
        np.full((len(codes), 2), 0b01010101, np.uint8), np.ones(len(codes), np.float16), np.cumsum(counts),
        np.ones(50, bool),
    )  # fmt: skip
    search = TensorSearch(arrays)
    search.by_kernel = True
    queries = TextVectors(torch.from_numpy(rng.normal(size=(8, 8)).astype(np.float32)), torch.tensor([5, 3]))
    present = np.delete(np.arange(50), [4, 11])
    docs = np.split(values.numpy()[codes], np.cumsum(counts)[:-1])
    for query, rows in zip(
        queries.values.split([5, 3]), search.candidates(queries, present, Effort(1, 20, 20)), strict=True
    ):
        scores = np.array([(doc @ query.numpy().T).max(0).sum() for doc in docs])
        scores[[4, 11]] = -np.inf
        assert len({*rows.tolist()} & {*np.argsort(-scores)[:20].tolist()}) >= 19  # 8 bits may swap the last two
    few = search.candidates(queries, present, Effort(1, 30, 10))  # the residuals are zero: the same scores
    for query, rows in zip(queries.values.split([5, 3]), few, strict=True):
        scores = np.array([(doc @ query.numpy().T).max(0).sum() for doc in docs])
        scores[[4, 11]] = -np.inf
        assert sorted(rows.tolist()) == sorted(np.argsort(-scores)[:10].tolist())


@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter compiles nothing")
def test_the_kernel_compiles():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ranker.interactions.kernels import code_scores as kernels

    types = {"table": "*u8", "codes": "*i32", "starts": "*i64", "scores": "*i32"}
    constants, signature, given = {"DOCS": 8, "ROWS": 64, "TOKENS": 32}, {}, {}
    for place, name in enumerate(kernels._code_scores.arg_names):
        if name in constants:
            signature[name], given[(place,)] = "constexpr", constants[name]
        else:
            signature[name] = types.get(name, "i32")
    source = ASTSource(fn=kernels._code_scores, signature=signature, constexprs=given)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernels.LAUNCH))
    assert compiled.asm["cubin"]
