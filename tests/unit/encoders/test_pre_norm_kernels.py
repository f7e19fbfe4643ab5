"""The pre-norm layer with hand-written backward passes has the states and gradients of the plain layer in float64.

Its kernels are plain torch here; test_gpu_pre_norm.py runs Triton's.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from ranker.encoders.attention import PackedRows, PaddedRows, padded_attention
from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.pre_norm_kernels import PreNormKernels, Stream, final_norm, pre_norm_kernel_layer
from ranker.encoders.pre_norm_layer import (
    PreNormFunctions,
    PreNormSettings,
    PreNormWeights,
    Rotary,
    pre_norm_layer,
    rotary_row_attention,
    rotated,
)
from ranker.encoders.ragged import RaggedLayout
from ranker.types import TokenBatch

DIM, HEADS, WIDE, WINDOW, EPSILON = 8, 2, 12, 2, 1e-5
LENGTHS = (3, 1, 6)
NO_ROWS = PackedRows(None, None, None, 0, None)  # the kernels below read no row boundaries
LINEARS = {"qkv": (3 * DIM, DIM), "attention_out": (DIM, DIM), "up": (2 * WIDE, DIM), "down": (DIM, WIDE)}


def layout() -> RaggedLayout:
    zeros = torch.zeros(sum(LENGTHS), dtype=torch.long)
    return RaggedLayout.of(TokenBatch(zeros, zeros, torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS)))


def rotary() -> Rotary:
    """Angles in float32, in which both layers rotate."""
    angles = torch.arange(6).unsqueeze(1) * torch.tensor([1.0, 0.1])
    return Rotary(angles.cos(), angles.sin(), layout().position_ids)


def gradients(function, grad_out, *inputs):
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad_out)


def plain_kernels() -> PreNormKernels:
    """Kernels in plain torch with the contracts of the Triton kernels."""

    def add_norm(x, residual, hashes, rate, gain, epsilon):
        summed = residual + (x if hashes is None else hashed_dropout(x, hashes.clone(), rate))
        return summed, layer_norm(summed, (DIM,), gain, None, epsilon)

    def add_norm_backward(grad_out, grad_summed, summed, hashes, rate, gain, epsilon):
        grad, grad_gain = gradients(lambda s, g: layer_norm(s, (DIM,), g, None, epsilon), grad_out, summed, gain)
        grad = grad + grad_summed
        return grad if hashes is None else hashed_dropout(grad, hashes.clone(), rate), grad, grad_gain

    def gated(x, activation, hashes, rate):
        assert activation == "gelu"
        inner, gate = x.chunk(2, -1)
        product = gelu(inner) * gate
        return product if hashes is None else hashed_dropout(product, hashes.clone(), rate)

    def gated_backward(grad_out, x, activation, hashes, rate):
        return gradients(lambda leaf: gated(leaf, activation, hashes, rate), grad_out, x)[0]

    def rotate_(qkv, cos, sin, position_ids, back=False):
        return qkv.copy_(rotated(qkv, Rotary(cos, -sin if back else sin, position_ids)))

    def attend(qkv, *boundaries, window):
        return padded_attention(qkv, PaddedRows(layout()), window), None

    def attend_backward(grad_out, qkv, mixed, log_sums, *boundaries, window, bias, angles):
        assert not bias
        grad = gradients(lambda leaf: padded_attention(leaf, PaddedRows(layout()), window), grad_out, qkv)[0]
        return rotate_(grad, *angles, layout().position_ids, back=True), None

    return PreNormKernels(
        SimpleNamespace(add_norm=add_norm, add_norm_backward=add_norm_backward),
        SimpleNamespace(gated=gated, gated_backward=gated_backward),
        SimpleNamespace(rotate_=rotate_),
        SimpleNamespace(attend=attend),
        SimpleNamespace(attend_backward=attend_backward),
    )


def weights(first: bool) -> PreNormWeights:
    made = {name: torch.randn(shape, dtype=torch.float64) for name, shape in LINEARS.items()}
    made["mlp_gain"] = torch.randn(DIM, dtype=torch.float64)
    made["attention_gain"] = None if first else torch.randn(DIM, dtype=torch.float64)
    return PreNormWeights(**{name: made.get(name) for name in PreNormWeights._fields})


def both(states, two_layers, final_gain, rate, first_tokens):
    """The states of two plain layers and a norm, and those of the layers with kernels."""
    tokens, settings = layout(), PreNormSettings(HEADS, WINDOW, rate, rate / 2, EPSILON)
    hashes = dropout_hashes(3, tokens.row_indices, tokens.position_ids, 4) if rate else [None] * 4
    functions, kernels = PreNormFunctions(rotary_row_attention, gelu), plain_kernels()
    plain, stream = states, Stream(states.clone(), None)
    for number, layer in enumerate(two_layers):
        selected = first_tokens if number else None
        keys = tuple(
            key if key is None or selected is None else key[selected] for key in hashes[2 * number : 2 * number + 2]
        )
        plain = pre_norm_layer(
            plain,
            layer,
            settings,
            functions,
            PaddedRows(tokens),
            rotary(),
            tuple(k if k is None else k.clone() for k in keys),
            selected,
        )
        stream = pre_norm_kernel_layer(stream, layer, settings, kernels, NO_ROWS, rotary(), keys, selected)
        torch.testing.assert_close(stream.states, plain, rtol=0, atol=1e-12)
    return layer_norm(plain, (DIM,), final_gain, None, EPSILON), final_norm(stream, final_gain, EPSILON, kernels)


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("frozen", [None, *range(12)])
def test_states_and_gradients_are_those_of_the_plain_layers(rate, firsts, frozen):
    torch.manual_seed(0)
    layers = [weights(first=True), weights(first=False)]
    final_gain = torch.randn(DIM, dtype=torch.float64)
    states = torch.randn(sum(LENGTHS), DIM, dtype=torch.float64)
    values = [states, final_gain, *(weight for layer in layers for weight in layer if weight is not None)]
    for number, value in enumerate(values):
        value.requires_grad = number != frozen
    first_tokens = layout().batch.cu_seqlens[:-1] if firsts else None
    expected, got = both(states, layers, final_gain, rate, first_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    trained, above = [value for value in values if value.requires_grad], torch.randn_like(expected)
    rights = torch.autograd.grad(expected, trained, above)
    for _ in range(2):  # several tasks may run backward through one graph
        for own, right in zip(torch.autograd.grad(got, trained, above, retain_graph=True), rights, strict=True):
            # rotations are in float32
            torch.testing.assert_close(own, right, rtol=0, atol=1e-5 * max(1.0, float(right.abs().max())))
