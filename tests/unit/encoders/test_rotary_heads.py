"""Normalised and rotated heads: the operation and its kernel against a loop over tokens and heads in float64."""

import os

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from ranker.encoders.rotary_heads import HeadNorms, rotary_heads, rotate_heads, rotate_heads_backward
from tests.assets.interpreter import run_interpreted

# tokens, heads of queries, keys and values, dim; with norms; whether gains get gradients
CASES = [
    ((5, (4, 2, 2), 16), True, True),
    ((5, (4, 2, 2), 16), True, False),
    ((37, (3, 1, 1), 12), True, True),  # a number of heads and a size that are no powers of two
    ((37, (3, 1, 1), 12), False, False),
    ((9, (2, 0, 0), 64), True, True),
    ((140, (2, 1, 1), 8), True, True),  # several programs share the sums
    ((0, (2, 1, 1), 8), True, True),
]
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
EPSILON = 1e-3  # large, so that a norm without it differs


def plain(x, gains, cos, sin, heads, dim):
    """Each head alone: divide it by its root mean square, multiply it by the gain, rotate pairs (i, i + dim / 2)."""
    results, half = [[], []], dim // 2
    for token in range(len(x)):
        for head in range(heads[0] + heads[1]):
            kind, values = int(head >= heads[0]), list(x[token, head * dim : (head + 1) * dim])
            if gains is not None:
                scale = (sum(value * value for value in values) / dim + EPSILON) ** -0.5
                values = [value * scale * gain for value, gain in zip(values, gains[kind], strict=True)]
            turned = [-value for value in values[half:]] + values[:half]
            parts = zip(values, turned, cos[token], sin[token], strict=True)
            results[kind].append(torch.stack([value * c + other * s for value, other, c, s in parts]))
    return [
        torch.stack(part).view(len(x), count, dim) if part else x.new_zeros(len(x), count, dim)
        for part, count in zip(results, heads[:2], strict=True)
    ]


def case(shape, norms, dtype=torch.float64, device="cpu"):
    """Return x in the columns of a wider tensor, gains, angles and the gradients of the results."""
    tokens, heads, dim = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, sum(heads) * dim + 16).to(device, dtype)[:, : sum(heads) * dim]
    gains = tuple((1 + torch.rand(2, dim)).to(device, dtype)) if norms else None
    cos, sin = torch.randn(2, tokens, dim).to(device, dtype)  # the halves differ
    above = [torch.randn(tokens, count, dim).to(device, dtype) for count in heads]
    return x, gains, cos, sin, above


def expected_of(shape, x, gains, cos, sin, above):
    """Return the loop's queries and keys, and its gradients of x and the gains."""
    _, heads, dim = shape
    x, cos, sin = (part.detach().cpu().double() for part in (x, cos, sin))
    leaves = [x.requires_grad_()]
    if gains is not None:
        gains = [gain.detach().cpu().double().requires_grad_() for gain in gains]
        leaves += gains
    value = x[:, sum(heads[:2]) * dim :].unflatten(1, (-1, dim)) if heads[2] else x.new_zeros(len(x), 0, dim)
    results = [*plain(x, gains, cos, sin, heads, dim), value]
    total = sum((part * grad.cpu().double()).sum() for part, grad in zip(results, above, strict=True))
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return [part.detach() for part in results[:2]], grads


@pytest.mark.parametrize(("shape", "norms", "sums"), CASES)
def test_the_operation_is_right_with_its_gradients(shape, norms, sums):
    x, gains, cos, sin, above = case(shape, norms)
    results, grads = expected_of(shape, x, gains, cos, sin, above)
    leaf = x.clone().requires_grad_()
    trained = None if gains is None else [gain.clone().requires_grad_(sums) for gain in gains]
    own = None if trained is None else HeadNorms(*trained, EPSILON)
    got = rotary_heads(leaf, own, cos, sin, *shape[1][:2])
    torch.testing.assert_close(list(got[:2]), results, rtol=0, atol=1e-12)
    torch.testing.assert_close(got[2].flatten(1), x[:, sum(shape[1][:2]) * shape[2] :], rtol=0, atol=0)
    leaves = [leaf, *(trained or [])] if sums else [leaf]
    mine = torch.autograd.grad(got, leaves, above)
    torch.testing.assert_close(list(mine), grads[: len(mine)], rtol=0, atol=1e-11)


def test_compiled_code_has_one_operation_each_way_for_any_number_of_tokens():
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    compiled = torch.compile(rotary_heads, dynamic=True, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for tokens in (5, 9, 12):
        x, gains, cos, sin, above = case((tokens, (4, 2, 2), 16), True)
        results = []
        for call in (rotary_heads, compiled):
            leaf = x.contiguous().requires_grad_()
            parts = call(leaf, HeadNorms(*gains, EPSILON), cos, sin, 4, 2)
            results.append([*parts, *torch.autograd.grad(parts, leaf, above)])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    forward, backward = graphs
    assert [name for name in forward if "rotate" in name] == ["ranker.rotate_heads.default"]
    assert not any("clone" in name or "copy" in name for name in forward), "values are a view"
    assert [name for name in backward if "getitem" not in name] == ["ranker.rotate_heads_backward.default"]


@pytest.mark.skipif(IN_INTERPRETER, reason="this process is the interpreter's")
def test_the_kernel_is_right_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    assert f"{len(CASES)} passed" in run_interpreted(__file__, "-k", "kernel_equals")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() and not IN_INTERPRETER, reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"
)
@pytest.mark.parametrize(("shape", "norms", "sums"), CASES)
def test_the_kernel_equals_the_loop(shape, norms, sums):
    from ranker.encoders.kernels import rotary_heads as kernels

    device, dtype, bound = ("cpu", torch.float32, 1e-5) if IN_INTERPRETER else ("cuda", torch.bfloat16, 2e-2)
    x, gains, cos, sin, above = case(shape, norms, dtype, device)
    heads = kernels.Heads(*shape[1])
    results, grads = expected_of(shape, x, gains, cos, sin, above)
    got = kernels.rotate_heads(x, gains, cos, sin, heads, EPSILON)
    once, again = (kernels.rotate_heads_backward(tuple(above), x, gains, cos, sin, EPSILON, sums) for _ in range(2))
    assert torch.equal(once[0], again[0]) and (not sums or torch.equal(once[1], again[1])), "sums have a fixed order"
    got = [*got, once[0], *(once[1] if sums else [])]
    for number, (mine, theirs) in enumerate(zip(got, [*results, *grads][: len(got)], strict=True)):
        assert mine.shape == theirs.shape
        assert (mine.double().cpu() - theirs).norm() <= bound * theirs.norm(), number


def test_operators_have_shapes_and_types_for_the_compiler():
    x, gains, cos, sin, above = case((5, (4, 2, 2), 16), True)
    torch.library.opcheck(rotate_heads, (x, *gains, cos, sin, [4, 2], EPSILON), test_utils="test_faketensor")
    for sums in (False, True):
        arguments = (*above, x, *gains, cos, sin, EPSILON, sums)
        torch.library.opcheck(rotate_heads_backward, arguments, test_utils="test_faketensor")
