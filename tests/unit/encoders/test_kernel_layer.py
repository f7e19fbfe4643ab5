"""The layer with a hand-written backward pass has the gradients of the plain layer; with kernels of plain torch."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from ranker.encoders import kernel_layer as kernel_module
from ranker.encoders.attention import PackedRows, PaddedRows, padded_attention, padded_average
from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.kernel_functions import Kernels
from ranker.encoders.kernel_layer import kernel_layer
from ranker.encoders.layer import (
    LayerFunctions,
    LayerSettings,
    LayerWeights,
    linear_activation,
    linear_attention,
    linear_residual_norm,
    post_norm_layer,
)
from ranker.encoders.ragged import RaggedLayout
from ranker.types import TokenBatch

DIM, HEADS, RATE, EPSILON = 8, 2, 0.25, 1e-5
LENGTHS = (3, 1, 5)
# the kernels below read no row boundaries
NO_ROWS = PackedRows(None, None, None, 0, None)
FUNCTIONS = LayerFunctions(
    linear_attention(padded_attention), padded_average, linear_activation(gelu), linear_residual_norm
)


def layout() -> RaggedLayout:
    zeros = torch.zeros(sum(LENGTHS), dtype=torch.long)
    return RaggedLayout.of(TokenBatch(zeros, zeros, torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS)))


def rows() -> PaddedRows:
    return PaddedRows(layout())


def gradients(function, grad_out, *inputs):
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad_out)


def plain_kernels() -> Kernels:
    """Kernels in plain torch with the contract of the Triton kernels.

    The gradient by the states is a new tensor. Without dropout it is the gradient by the product, too.
    """

    def attend(qkv, cu_seqlens, cu_keys, blocks):
        return padded_attention(qkv, rows()), torch.zeros(HEADS, len(qkv))

    def attend_backward(grad_out, qkv, mixed, log_sums, *boundaries):
        (grad,) = gradients(lambda leaf: padded_attention(leaf, rows()), grad_out, qkv)
        return grad, grad.sum(0).flatten()

    def bias_gelu(x, bias):
        return gelu(x + bias)

    def bias_gelu_backward(grad_out, x, bias):
        grad = gradients(lambda leaf: gelu(leaf + bias), grad_out, x)[0]
        grad_out.fill_(math.nan)  # the Triton kernel overwrites it
        return grad, grad.sum(0)

    def residual_norm(x, bias, states, hashes, rate, gain, shift, epsilon):
        product = x + bias
        dropped = product if hashes is None else hashed_dropout(product, hashes.clone(), rate)
        return layer_norm(dropped + states, (DIM,), gain, shift, epsilon)

    def residual_norm_backward(grad_out, x, bias, states, hashes, rate, gain, epsilon):
        shift = torch.zeros_like(gain)
        x_grad, bias_grad, grad, gain_grad, shift_grad = gradients(
            lambda x, bias, states, gain, shift: residual_norm(x, bias, states, hashes, rate, gain, shift, epsilon),
            grad_out,
            x,
            bias,
            states,
            gain,
            shift,
        )
        return torch.stack([bias_grad, gain_grad, shift_grad]), grad, grad if hashes is None else x_grad

    def average(states, queries, boundaries):
        return padded_average(states, queries, rows())

    return Kernels(
        attend, attend_backward, bias_gelu, bias_gelu_backward, residual_norm, residual_norm_backward, average
    )


def weights() -> LayerWeights:
    square, wide = [(DIM, DIM), (DIM,)], [(4 * DIM, DIM), (4 * DIM,), (DIM, 4 * DIM), (DIM,)]
    shapes = [*square * 4, *wide, *[(DIM,)] * 4]
    return LayerWeights(*(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes))


def both_layers(states, layer, rate, hashes, first_tokens):
    """The states of the plain layer and of the one with kernels."""
    settings = LayerSettings(HEADS, rate, EPSILON)
    return (
        post_norm_layer(states, layer, settings, FUNCTIONS, rows(), hashes, first_tokens),
        kernel_layer(states, layer, settings, plain_kernels(), NO_ROWS, hashes, first_tokens),
    )


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("firsts", [False, True])
def test_states_and_gradients_are_those_of_the_plain_layer(rate, firsts):
    torch.manual_seed(0)
    tokens = layout()
    states = torch.randn(sum(LENGTHS), DIM, dtype=torch.float64, requires_grad=True)
    first_tokens = tokens.batch.cu_seqlens[:-1] if firsts else None
    hashes = dropout_hashes(3, tokens.row_indices, tokens.position_ids, 2) if rate else None
    if hashes is not None and first_tokens is not None:
        hashes = hashes.index_select(1, first_tokens)
    layer = weights()
    expected, got = both_layers(states, layer, rate, hashes, first_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grad_out = torch.randn_like(expected)
    for mine, right in zip(
        torch.autograd.grad(got, (states, *layer), grad_out),
        torch.autograd.grad(expected, (states, *layer), grad_out),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("alone", range(17))
@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_tensors_get_no_gradient_and_the_others_the_right_one(alone, frozen, firsts):
    torch.manual_seed(1)
    layer = weights()
    values = (torch.randn(sum(LENGTHS), DIM, dtype=torch.float64), *layer)
    for number, value in enumerate(values):
        value.requires_grad = (number == alone) != frozen  # the only trained tensor, or the only frozen one
    trained = [value for value in values if value.requires_grad]
    first_tokens = layout().batch.cu_seqlens[:-1] if firsts else None
    expected, got = both_layers(values[0], layer, 0.0, None, first_tokens)
    grad_out = torch.randn_like(expected)
    rights = torch.autograd.grad(expected, trained, grad_out)
    for _ in range(2):  # several tasks may run backward through one graph
        for mine, right in zip(torch.autograd.grad(got, trained, grad_out, retain_graph=True), rights, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-10)


def recorded_shapes(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights whose gradients are computed."""
    shapes: list[tuple[int, ...]] = []
    original = kernel_module.weight_gradient

    def weight_gradient(grad_out, inner, dtype):
        shapes.append((grad_out.shape[1], inner.shape[1]))
        return original(grad_out, inner, dtype)

    monkeypatch.setattr(kernel_module, "weight_gradient", weight_gradient)
    return shapes


@pytest.mark.parametrize(
    ("trained", "shapes"), [(1, [(24, 8)]), (7, [(8, 8)]), (9, [(32, 8)]), (11, [(8, 32)]), (8, [])]
)
def test_no_gradient_of_a_frozen_matrix_is_computed(monkeypatch, trained, shapes):
    layer = weights()
    values = (torch.randn(sum(LENGTHS), DIM, dtype=torch.float64), *layer)
    computed = recorded_shapes(monkeypatch)
    for number, value in enumerate(values):
        value.requires_grad = number == trained
    settings = LayerSettings(HEADS, 0.0, EPSILON)
    kernel_layer(values[0], layer, settings, plain_kernels(), NO_ROWS, None, None).sum().backward()
    assert computed == shapes
