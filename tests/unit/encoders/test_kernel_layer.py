"""The layer whose backward pass is written out: autograd's gradients of the plain layer, with kernels of plain torch on a CPU."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from ranker.encoders import kernel_layer as kernel_module
from ranker.encoders.attention import RaggedLayout, padded_attention, padded_average
from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.fused import Parts, plain_attend, plain_join, plain_widen, post_norm_layer
from ranker.encoders.kernel_layer import Kernels, kernel_layer
from ranker.types import TokenBatch

DIM, HEADS, RATE, EPSILON = 8, 2, 0.25, 1e-5
LENGTHS = (3, 1, 5)


def layout() -> RaggedLayout:
    nothing = torch.zeros(sum(LENGTHS), dtype=torch.long)
    return RaggedLayout.of(TokenBatch(nothing, nothing, torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS)))


def differentiated(function, above, *inputs):
    with torch.enable_grad():
        own = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*own), own, above)


def plain_kernels() -> Kernels:
    """Of the same contract as ours: the gradient by the states is a tensor of its own, which is the product's, too, where nothing is dropped."""

    def attend(qkv, cu_seqlens, cu_keys, blocks):
        return padded_attention(qkv, layout()), torch.zeros(HEADS, len(qkv))

    def attend_backward(above, qkv, mixed, logs, *places):
        (grad,) = differentiated(lambda own: padded_attention(own, layout()), above, qkv)
        return grad, grad.sum(0).flatten()

    def widen(x, bias):
        return gelu(x + bias)

    def widen_backward(above, x, bias):
        grad = differentiated(lambda own: gelu(own + bias), above, x)[0]
        above.fill_(math.nan)  # ours writes over it
        return grad, grad.sum(0)

    def join(x, bias, states, hashes, rate, gain, shift, epsilon):
        added = x + bias
        return layer_norm(
            (added if hashes is None else hashed_dropout(added, hashes.clone(), rate)) + states,
            (DIM,),
            gain,
            shift,
            epsilon,
        )

    def join_backward(above, x, bias, states, hashes, rate, gain, epsilon):
        shift = torch.zeros_like(gain)
        x_grad, bias_grad, grad, gain_grad, shift_grad = differentiated(
            lambda x, bias, states, gain, shift: join(x, bias, states, hashes, rate, gain, shift, epsilon),
            above,
            x,
            bias,
            states,
            gain,
            shift,
        )
        return torch.stack([bias_grad, gain_grad, shift_grad]), grad, grad if hashes is None else x_grad

    def average(states, reach, *places):
        return padded_average(states, reach, layout())

    return Kernels(attend, attend_backward, widen, widen_backward, join, join_backward, average)


def weights() -> tuple[torch.Tensor, ...]:
    square, wide = [(DIM, DIM), (DIM,)], [(4 * DIM, DIM), (4 * DIM,), (DIM, 4 * DIM), (DIM,)]
    return tuple(
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [*square * 4, *wide, *[(DIM,)] * 4]
    )


@pytest.mark.parametrize("drop", [0.0, RATE])
@pytest.mark.parametrize("firsts", [False, True])
def test_states_and_gradients_are_those_of_the_plain_layer(drop, firsts):
    torch.manual_seed(0)
    places = layout()
    states = torch.randn(sum(LENGTHS), DIM, dtype=torch.float64, requires_grad=True)
    wanted = places.batch.cu_seqlens[:-1] if firsts else None
    hashes = dropout_hashes(3, places.rows, places.positions, 2) if drop else None
    own = hashes if hashes is None or wanted is None else hashes.index_select(1, wanted)
    layer = weights()
    parts = Parts(plain_attend(padded_attention), padded_average, plain_widen(gelu), plain_join)
    expected = post_norm_layer(states, layer, HEADS, drop, own, EPSILON, wanted, parts, (places, 0.0))
    found = kernel_layer(states, layer, HEADS, drop, own, EPSILON, wanted, plain_kernels(), (None, None, None, 0, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    above = torch.randn_like(expected)
    for got, right in zip(
        torch.autograd.grad(found, (states, *layer), above),
        torch.autograd.grad(expected, (states, *layer), above),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("alone", range(17))
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(alone, frozen, firsts):
    torch.manual_seed(1)
    layer, places = weights(), layout()
    values = (torch.randn(sum(LENGTHS), DIM, dtype=torch.float64), *layer)
    for number, value in enumerate(values):
        value.requires_grad = (number == alone) != frozen  # the only one that is trained, or the only one that is not
    states, trained = values[0], [value for value in values if value.requires_grad]
    wanted = places.batch.cu_seqlens[:-1] if firsts else None
    parts = Parts(plain_attend(padded_attention), padded_average, plain_widen(gelu), plain_join)
    expected = post_norm_layer(states, layer, HEADS, 0.0, None, EPSILON, wanted, parts, (places, 0.0))
    found = kernel_layer(states, layer, HEADS, 0.0, None, EPSILON, wanted, plain_kernels(), (None, None, None, 0, None))
    above = torch.randn_like(expected)
    rights = torch.autograd.grad(expected, trained, above)
    for _ in range(2):  # a graph may be gone through again, as one of several tasks
        for got, right in zip(torch.autograd.grad(found, trained, above, retain_graph=True), rights, strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-10)


def calls(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights whose gradients are made."""
    made: list[tuple[int, ...]] = []
    own = kernel_module._product

    def product(above, inner, dtype):
        made.append((above.shape[1], inner.shape[1]))
        return own(above, inner, dtype)

    monkeypatch.setattr(kernel_module, "_product", product)
    return made


@pytest.mark.parametrize(
    ("trained", "shapes"), [(1, [(24, 8)]), (7, [(8, 8)]), (9, [(32, 8)]), (11, [(8, 32)]), (8, [])]
)
def test_no_gradient_of_a_frozen_matrix_is_made(monkeypatch, trained, shapes):
    values, made = (torch.randn(sum(LENGTHS), DIM, dtype=torch.float64), *weights()), calls(monkeypatch)
    for number, value in enumerate(values):
        value.requires_grad = number == trained
    kernel_layer(
        values[0], values[1:], HEADS, 0.0, None, EPSILON, None, plain_kernels(), (None, None, None, 0, None)
    ).sum().backward()
    assert made == shapes
