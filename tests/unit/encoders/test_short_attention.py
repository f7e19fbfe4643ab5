"""Attention within short rows: the kernels in Triton's interpreter against float64, row by row."""

import pytest
import torch

from ranker.encoders.ragged import RaggedLayout
from ranker.types import TokenBatch
from tests.assets.interpreter import interpreted

LENGTHS, ATTENDED = [5, 66, 200], [5, 40, 171]  # rows in one tile, and a row of several blocks


def plain(qkv, window):
    """softmax(q . k / sqrt(size)) v over the first tokens of a token's row, for each head of each row."""
    rows = []
    for (q, k, v), count in zip((row.unbind(1) for row in qkv.split(LENGTHS)), ATTENDED, strict=True):
        distance = (torch.arange(len(q)).unsqueeze(1) - torch.arange(count)).abs()
        far = (distance > window) if window else torch.zeros_like(distance, dtype=torch.bool)
        logits = torch.einsum("ihd,jhd->hij", q, k[:count]) * q.shape[-1] ** -0.5
        rows.append(torch.einsum("hij,jhd->ihd", logits.masked_fill(far, float("-inf")).softmax(-1), v[:count]))
    return torch.cat(rows)


def blocks_and_ends():
    """Cumulative lengths of the rows, of their attended tokens, and the rows' blocks."""
    ends, zeros = torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.zeros(sum(LENGTHS), dtype=torch.long)
    layout = RaggedLayout.of(TokenBatch(zeros, zeros, ends, max(LENGTHS)))
    return ends, torch.tensor([0, *ATTENDED]).cumsum(0).int(), layout.blocks


KERNELS = """
import torch
from ranker.encoders.kernels.short_attention import attend
from ranker.encoders.kernels.short_attention_backward import attend_backward
from tests.unit.encoders.test_short_attention import blocks_and_ends, plain

rows = blocks_and_ends()
tokens = int(rows[0][-1])
for window, shift in ((None, 0.0), (150, 0.0), (None, 30.0)):
    torch.manual_seed(0)
    qkv, grad_out = torch.randn(tokens, 3, 2, 16), torch.randn(tokens, 2, 16)
    qkv[:, 0, :, 0] += shift  # with 30, each logit is about -225, so exp(0 - their log-sum) would be infinite
    qkv[:, 1, :, 0] -= shift
    states = qkv.double().requires_grad_()
    expected = plain(states, window)
    expected.backward(grad_out.double())
    out, sums = attend(qkv, *rows, window=window)
    grad, bias = attend_backward(grad_out, qkv, out, sums, *rows, window=window)
    near = 1e-3 if shift else 1e-5  # a logit of 225 in float32 is exact to 1e-5, its weight to as much
    assert (out - expected).abs().max() < near, (window, shift, (out - expected).abs().max())
    assert (grad - states.grad).abs().max() < near * (1 + shift), (window, shift, (grad - states.grad).abs().max())
    assert (bias - states.grad.sum(0).flatten()).abs().max() < near * 20 * (1 + shift)
"""


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    interpreted(lambda: exec(KERNELS, {}))
