"""The Triton kernel of MaxSim against plain loops in float64: in Triton's interpreter on a CPU, compiled on a GPU."""

import os

import pytest
import torch

from ranker.interactions import maxsim as reference
from ranker.interactions.maxsim import TextVectors, maxsim_all, maxsim_pairs
from ranker.interactions.maxsim_pairs import Pairs
from tests.assets.interpreter import run_interpreted

triton = pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")

from ranker.interactions.kernels.maxsim import maxsim  # noqa: E402

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Triton reads the variable when it is imported, so these tests run in a process of their own
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IN_INTERPRETER, reason="test_in_the_interpreter runs it in another process")


@pytest.mark.skipif(IN_INTERPRETER, reason="this is that process")
def test_in_the_interpreter():
    assert "8 passed" in run_interpreted(__file__)


def texts(counts, dim, seed, dtype=torch.float32, device="cpu"):
    values = torch.randn(sum(counts), dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return TextVectors(values.to(device), torch.tensor(counts, device=device))


def by_loops(queries, docs, pairs, weights):
    """Scores of pairs and the gradients of their weighted sum, by loops in float64."""
    parts = [text.values.detach().double().cpu() for text in (queries, docs)]
    split = [values.split(text.counts.tolist()) for values, text in zip(parts, (queries, docs), strict=True)]
    gradients = [torch.zeros_like(values) for values in parts]
    own = [grad.split(text.counts.tolist()) for grad, text in zip(gradients, (queries, docs), strict=True)]
    scores = []
    for (query, doc), weight in zip(pairs, weights.tolist(), strict=True):
        total = 0.0
        for token, vector in enumerate(split[0][query]):
            similarities = split[1][doc] @ vector
            place = int(similarities.argmax())
            total += float(similarities[place])
            own[0][query][token] += weight * split[1][doc][place]
            own[1][doc][place] += weight * vector
        scores.append(total)
    return torch.tensor(scores, dtype=torch.float64), *gradients


SHAPES = [
    ([3, 1, 20, 7], [5, 70, 1, 130], 24),  # several blocks of doc vectors, a dim that is no power of two
    ([70, 2], [9, 64, 65], 16),  # several blocks of query vectors
]


@interpreted
@pytest.mark.parametrize(("query_counts", "doc_counts", "dim"), SHAPES)
def test_scores_and_gradients_are_those_of_loops(query_counts, doc_counts, dim):
    queries, docs = texts(query_counts, dim, 0), texts(doc_counts, dim, 1)
    pairs = [(query, doc) for query in range(len(query_counts)) for doc in range(len(doc_counts))][::-1][1:]
    weights = torch.randn(len(pairs), generator=torch.Generator().manual_seed(2))
    leaves = [text.values.requires_grad_() for text in (queries, docs)]
    chosen = torch.tensor(pairs).unbind(1)
    scores = maxsim(*leaves, Pairs(queries, docs, chosen))
    (scores * weights).sum().backward()
    expected = by_loops(queries, docs, pairs, weights)
    for value, truth in zip((scores.detach(), leaves[0].grad, leaves[1].grad), expected, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-4)


@interpreted
@pytest.mark.parametrize(("query_counts", "doc_counts", "dim"), SHAPES)
def test_every_query_with_every_doc(query_counts, doc_counts, dim):
    queries, docs = texts(query_counts, dim, 0), texts(doc_counts, dim, 1)
    pairs = [(query, doc) for query in range(len(query_counts)) for doc in range(len(doc_counts))]
    weights = torch.randn(len(pairs), generator=torch.Generator().manual_seed(2))
    leaves = [text.values.requires_grad_() for text in (queries, docs)]
    scores = maxsim(*leaves, Pairs(queries, docs))
    (scores * weights).sum().backward()
    expected = by_loops(queries, docs, pairs, weights)
    for value, truth in zip((scores.detach(), leaves[0].grad, leaves[1].grad), expected, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-4)


@interpreted
def test_docs_of_16_bits_are_compared_in_the_type_of_the_query():
    queries, docs = texts([3, 20], 16, 0), texts([5, 70, 1], 16, 1, torch.float16)
    scores = maxsim(queries.values, docs.values, Pairs(queries, docs)).view(2, 3)
    wide = TextVectors(docs.values.float(), docs.counts)
    torch.testing.assert_close(scores, maxsim_all(queries, wide), rtol=0, atol=1e-5)
    torch.testing.assert_close(maxsim_all(queries, docs), maxsim_all(queries, wide), rtol=0, atol=0)


@interpreted
def test_of_equal_similarities_the_first_gets_the_gradient():
    query, doc = TextVectors(torch.ones(1, 16), torch.tensor([1])), TextVectors(torch.ones(70, 16), torch.tensor([70]))
    maxsim(query.values, doc.values.requires_grad_(), Pairs(query, doc)).sum().backward()
    assert doc.values.grad.sum(1).nonzero().flatten().tolist() == [0]


@interpreted
def test_no_pairs_and_a_query_without_vectors():
    queries, docs = texts([0, 2], 16, 0), texts([3], 16, 1)
    none = torch.zeros(0, dtype=torch.int64)
    assert maxsim(queries.values, docs.values, Pairs(queries, docs, (none, none))).shape == (0,)
    truth = float((queries.values @ docs.values.T).max(1).values.sum())
    for chosen in (None, (torch.tensor([0, 1]), torch.tensor([0, 0]))):
        scores = maxsim(queries.values, docs.values, Pairs(queries, docs, chosen))
        assert scores[0] == 0 and scores[1] == pytest.approx(truth)
    empty = texts([0, 0], 16, 0)
    assert maxsim(empty.values, docs.values, Pairs(empty, docs)).tolist() == [0, 0]


@interpreted
def test_both_functions_call_it_with_their_pairs(monkeypatch):
    monkeypatch.setattr(reference, "has_kernel", lambda queries, docs: True)
    queries, docs, owners = texts([4, 9], 16, 0), texts([5, 1, 40], 16, 1), torch.tensor([1, 0, 1])
    found = maxsim_all(queries, docs), maxsim_pairs(queries, docs, owners)
    monkeypatch.undo()
    torch.testing.assert_close(found[0], maxsim_all(queries, docs), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], maxsim_pairs(queries, docs, owners), rtol=0, atol=1e-5)
    assert not reference.has_kernel(queries, docs)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=ON_GPU), pytest.param(torch.bfloat16, marks=ON_GPU)]
)
def test_on_a_gpu_it_is_the_plain_form_and_repeats_its_bits(dtype):
    queries = texts([32] * 6, 128, 0, dtype, "cuda")
    docs = texts([int(count) for count in torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(3))],
                 128, 1, dtype, "cuda")  # fmt: skip
    pairs = [(query, doc) for query in range(6) for doc in range(40)]
    weights = torch.randn(len(pairs), generator=torch.Generator().manual_seed(2))
    runs = []
    for _ in range(2):
        leaves = [text.values.detach().clone().requires_grad_() for text in (queries, docs)]
        scores = maxsim_all(TextVectors(leaves[0], queries.counts), TextVectors(leaves[1], docs.counts))
        (scores.flatten() * weights.cuda()).sum().backward()
        runs.append((scores.detach().flatten(), leaves[0].grad, leaves[1].grad))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    tolerance = 1e-3 if dtype == torch.float32 else 0.5
    for value, truth in zip(runs[0], by_loops(queries, docs, pairs, weights), strict=True):
        torch.testing.assert_close(value.double().cpu(), truth, rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=ON_GPU)])
def test_on_a_gpu_the_host_does_not_wait(dtype, chosen):
    queries, docs = texts([32] * 6, 128, 0, dtype, "cuda"), texts([3, 70, 20], 128, 1, dtype, "cuda")
    owners = torch.tensor([0, 5, 2], device="cuda")
    call = (lambda: maxsim_pairs(queries, docs, owners)) if chosen else (lambda: maxsim_all(queries, docs))
    first = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("capability", "vectors", "precision", "every"), [(90, "bf16", "ieee", True), (89, "fp32", "tf32x3", False)]
)
def test_the_kernels_compile_and_fit_into_shared_memory(capability, vectors, precision, every):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ranker.interactions.kernels import maxsim as kernels

    types = {"queries": vectors, "docs": vectors, "out": vectors, "scores": "fp32", "grads": "fp32", "places": "i16"}
    constants = {"DIM": 128, "COLUMNS": 128, "QUERY_ROWS": 32, "DOC_ROWS": 64, "PRECISION": precision, "SAVE": True}
    constants["EVERY"] = every
    for kernel, launch in (
        (kernels._forward, kernels.FORWARD),
        (kernels._queries_backward, kernels.BACKWARD),
        (kernels._docs_backward, kernels.BACKWARD),
    ):
        signature, given = {}, {}
        for place, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name], given[(place,)] = "constexpr", constants[name]
            else:
                signature[name] = "i32" if name in kernels.SIZES else f"*{types.get(name, 'i64')}"
        source = ASTSource(fn=kernel, signature=signature, constexprs=given)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch))
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024
