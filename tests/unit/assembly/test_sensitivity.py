"""Few bits: rounding in groups by hand, and the Hessian's trace against the whole Hessian."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranker.assembly.sensitivity import hessian_traces, in_groups, sensitivities


def test_rounding_in_groups_by_hand():
    weight = torch.tensor([[7.0, 2.4, -0.6, 0.7, 0.34], [0.0, 0.0, 0.0, 3.5, 1.0]])
    # units: 1 and 0.1 and 0.34 / 7 in the first row; 1 (of zeros) and 0.5 and 1 / 7 in the second
    expected = [[7.0, 2.0, -0.6, 0.7, 0.34], [0.0, 0.0, 0.0, 3.5, 1.0]]
    assert in_groups(weight, bits=4, group=2).tolist() == [pytest.approx(row) for row in expected]
    assert in_groups(torch.tensor([[1.0, -0.4, 0.6]]), bits=2).tolist() == [[1.0, -0.0, 1.0]]


def test_the_trace_is_that_of_the_whole_hessian():
    torch.manual_seed(0)
    inputs = torch.randn(6, 3, dtype=torch.float64)
    first, second = torch.randn(4, 3, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)

    def loss(one, two):
        keys = torch.tanh(inputs @ one.t())
        mixed = nn.functional.scaled_dot_product_attention(keys[None, None], keys[None, None], keys[None, None])
        return (mixed[0, 0] @ two.t()).square().mean()

    with sdpa_kernel(SDPBackend.MATH):
        whole = torch.autograd.functional.hessian(loss, (first, second))
    expected = {
        "first": float(whole[0][0].reshape(12, 12).trace()), "second": float(whole[1][1].reshape(4, 4).trace())
    }  # fmt: skip
    weights = {"first": first.clone().requires_grad_(), "second": second.clone().requires_grad_()}
    found = hessian_traces([lambda: loss(*weights.values())], weights, draws=3000)
    assert found == {name: pytest.approx(value, rel=0.1) for name, value in expected.items()}
    rows = {row["weight"]: row for row in sensitivities(weights, found)}
    for name, weight in weights.items():
        error = float((in_groups(weight) - weight).square().sum())
        assert rows[name]["sensitivity"] == pytest.approx(found[name] / weight.numel() * error)
    assert list(rows) == sorted(rows, key=lambda name: -rows[name]["sensitivity"])
