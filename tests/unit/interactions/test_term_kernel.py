"""The Triton kernel of term weights against plain forms in float64: in Triton's interpreter, compiled on a GPU."""

import os

import pytest
import torch

from ranker.interactions import term_pooling
from ranker.interactions.term_pooling import term_weights
from ranker.types import TokenBatch
from tests.assets.interpreter import run_interpreted

triton = pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")

from ranker.interactions.kernels import term_pooling as kernels  # noqa: E402

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Triton reads the variable when it is imported, so these tests run in a process of their own
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IN_INTERPRETER, reason="test_in_the_interpreter runs it in another process")


@pytest.mark.skipif(IN_INTERPRETER, reason="this is that process")
def test_in_the_interpreter():
    assert "5 passed" in run_interpreted(__file__)


def batch_of(lengths, device="cpu"):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return TokenBatch(tokens, tokens, offsets, max(lengths)).to(device)


def drawn(lengths, words, dim, dtype=torch.float32, device="cpu"):
    """Inputs, matrix and bias; and a gradient that is 0 for most terms, as that of weights of 0."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(*shape, generator=generator) / dim**0.25 for shape in ((sum(lengths), dim), (words, dim))]
    upstream = torch.randn(len(lengths), words, generator=generator)
    upstream *= torch.rand(upstream.shape, generator=generator) < 0.3
    bias = torch.randn(words, generator=generator)
    return [value.to(device, dtype) for value in (*values, bias)], upstream.to(device)


def plain(inputs, matrix, bias, lengths, pooling, activation):
    """The weights of each text by a loop over texts."""
    weights = []
    for row in inputs.split(lengths):
        values = torch.log1p(torch.relu(row @ matrix.T + (0 if bias is None else bias)))
        values = torch.log1p(values) if activation == "log1p_relu" else values
        weights.append(values.max(0).values if pooling == "max" else values.sum(0))
    return torch.stack(weights)


def both(values, upstream, lengths, pooling, activation, dtype):
    """Weights and gradients of the kernel, and of the plain form in float64 of the same numbers."""
    results = []
    for kind in (dtype, torch.float64):
        leaves = [value.to(kind).clone().requires_grad_() for value in values]
        if kind == torch.float64:
            out = plain(*leaves, *([] if len(values) == 3 else [None]), lengths, pooling, activation)
        else:
            batch = batch_of(lengths, leaves[0].device)
            out = term_weights(*leaves, *([] if len(values) == 3 else [None]), batch, pooling, activation)
        results.append([out.detach(), *torch.autograd.grad((out * upstream.to(out)).sum(), leaves)])
    return results


@interpreted
@pytest.mark.parametrize(
    ("pooling", "activation", "has_bias"), [("max", "relu", True), ("max", "relu", False), ("sum", "log1p_relu", True)]
)
def test_weights_and_gradients_are_those_of_the_plain_form(monkeypatch, pooling, activation, has_bias):
    monkeypatch.setattr(term_pooling, "has_kernel", lambda inputs, dtype: True)
    lengths = [3, 140, 1, 20]  # several blocks of tokens; words that end within a block
    values, upstream = drawn(lengths, 300, 48)
    for got, expected in zip(*both(values[: 2 + has_bias], upstream, lengths, pooling, activation, torch.float32),
                             strict=True):  # fmt: skip
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-5)


@interpreted
def test_of_equal_logits_the_first_token_gets_the_gradient():
    inputs, matrix = torch.ones(150, 16), torch.ones(3, 16)
    batch = batch_of([20, 130])
    _, places = kernels.largest(inputs, matrix, None, batch, save=True)
    assert places.tolist() == [[0, 0, 0], [20, 20, 20]]
    by_inputs, _ = kernels.largest_backward(torch.ones(2, 3), places, inputs, matrix, batch)
    assert by_inputs.sum(1).nonzero().flatten().tolist() == [0, 20]


def test_without_a_gpu_in_float64_and_for_odd_sizes_the_blocks_are_taken():
    class OnGPU:
        is_cuda = True
        shape = (5, 48)

    class Odd(OnGPU):
        shape = (5, 50)

    assert kernels.takes(OnGPU, torch.bfloat16)
    assert not kernels.takes(Odd, torch.bfloat16) and not kernels.takes(OnGPU, torch.float64)
    assert not term_pooling.has_kernel(torch.zeros(5, 48), torch.float32)


@pytest.mark.parametrize("pooling", [pytest.param(name, marks=ON_GPU) for name in ("max", "sum")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("words", "dim"), [(30522, 128), (50368, 768)])
def test_on_a_gpu_it_is_the_plain_form_and_repeats_its_bits(pooling, dtype, words, dim):
    generator = torch.Generator().manual_seed(3)
    lengths = [int(length) for length in torch.randint(1, 200, (24,), generator=generator)]
    values, upstream = drawn(lengths, words, dim, dtype, "cuda")
    assert term_pooling.has_kernel(values[0], dtype)
    first, expected = both(values, upstream, lengths, pooling, "relu", dtype)
    again, _ = both(values, upstream, lengths, pooling, "relu", dtype)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for place, (got, truth) in enumerate(zip(first, expected, strict=True)):
        error = (got.double() - truth).norm() / truth.norm()
        # of 73 million logits a few are so near 0 that rounding changes their sign, and with it the gradient of a sum
        exact = 5e-3 if pooling == "sum" and place > 0 else 1e-4
        assert error < (exact if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("pooling", [pytest.param(name, marks=ON_GPU) for name in ("max", "sum")])
def test_on_a_gpu_no_logits_of_all_tokens_are_in_memory(pooling):
    lengths, words = [128] * 64, 30522
    (inputs, matrix, bias), _ = drawn(lengths, words, 128, torch.bfloat16, "cuda")
    batch = batch_of(lengths, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        term_weights(inputs, matrix, bias, batch, pooling, "relu")
    assert torch.cuda.max_memory_allocated() - before < sum(lengths) * words * 2 / 8


@pytest.mark.parametrize("form", [pytest.param(name, marks=ON_GPU) for name in ("max", "sum")])
def test_on_a_gpu_the_blocks_are_the_plain_form_too(monkeypatch, form):
    monkeypatch.setattr(term_pooling, "has_kernel", lambda inputs, dtype: False)
    lengths = [7, 130, 1, 64]
    values, upstream = drawn(lengths, 1000, 64, torch.float32, "cuda")
    for got, truth in zip(*both(values, upstream, lengths, form, "relu", torch.float32), strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("capability", "vectors", "mean", "pooling"),
    [(90, "bf16", 128, "max"), (89, "bf16", 40, "max"), (90, "bf16", 128, "sum"), (90, "fp32", 128, "max")],
)
def test_the_kernels_compile_and_fit_into_shared_memory(capability, vectors, mean, pooling):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("grads", "out", "bias"), "*fp32") | {"cu_seqlens": "*i32", "places": "*i32"}
    types |= {"words": "i32", "rows": "i32"}
    item_bytes = 4 if vectors == "fp32" else 2
    sizes = kernels.tile(mean, 768, item_bytes)
    constants = {**sizes, "DIM": 768, "SUM": pooling == "sum", "LOGARITHMS": 2, "BIAS": True, "SAVE": pooling == "max"}
    constants["PRECISION"] = "tf32x3" if vectors == "fp32" else "ieee"
    launches = [(kernels._pool, {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES})]
    if pooling == "max":
        launches += [(kernels._inputs_backward, kernels.INPUTS), (kernels._matrix_backward, kernels.MATRIX)]
    for kernel, launch in launches:
        given_sizes = {**constants, "COLUMNS": kernels.columns(768, item_bytes), **launch}
        signature, given, attributes = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            if name in given_sizes:
                signature[name], given[(place,)] = "constexpr", given_sizes[name]
                continue
            kind = f"*{vectors}" if name == "out" and kernel is kernels._inputs_backward else types.get(name)
            signature[name] = kind or f"*{vectors}"
            if signature[name].startswith("*"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=attributes)
        options = {name: launch[name] for name in ("num_warps", "num_stages")}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024 * (1 if capability == 89 else 2)
