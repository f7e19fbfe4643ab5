"""Gradients of small tables, summed in a fixed order: those of torch's own lookup."""

import pytest
import torch
from torch import nn

from ranker.encoders import lookup
from ranker.encoders.attention import RaggedLayout, with_tail
from ranker.types import TokenBatch


def layout_of(lengths: list[int], filled: bool = False) -> RaggedLayout:
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    batch = TokenBatch(ids, ids, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    return RaggedLayout.of(with_tail(batch) if filled else batch)


@pytest.mark.parametrize("group", [1, 2, 256])
@pytest.mark.parametrize("lengths", [[3], [3, 1, 5], [2, 0, 4, 4, 1, 0], [64, 3]])
def test_sums_by_position_worked_out_by_hand(monkeypatch, group, lengths):
    monkeypatch.setattr(lookup, "GROUP", group)
    values = torch.randn(sum(lengths), 4, dtype=torch.float64)
    rows = values.split(lengths)
    expected = [
        sum((row[place] for row in rows if len(row) > place), torch.zeros(4, dtype=torch.float64))
        for place in range(max(lengths))
    ]
    for more in (0, 9):
        found = lookup.position_sums(values, layout_of(lengths), max(lengths) + more)
        torch.testing.assert_close(found[: max(lengths)], torch.stack(expected), rtol=0, atol=1e-12)
        assert not found[max(lengths) :].any()


def test_sums_in_half_precision_are_made_in_full():
    lengths = [2] * 300  # one by one in bfloat16, 256 + 1 is 256
    assert lookup.position_sums(torch.ones(600, 1, dtype=torch.bfloat16), layout_of(lengths), 3).tolist() == [
        [300.0],
        [300.0],
        [0.0],
    ]


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("filled", [False, True])
def test_positions_and_their_gradients_are_torchs_own(shift, filled):
    torch.manual_seed(0)
    layout = layout_of([7, 30, 1, 12], filled)
    table = nn.Embedding(50, 6).double()
    layout.batch.max_length = 2  # a graph keeps that of another batch
    found = lookup._Positions.apply(table.weight, layout, shift)
    expected = table(layout.positions[:50] + shift)
    above = torch.randn_like(expected)
    assert found[:50].equal(expected)
    (gradient,) = torch.autograd.grad(found[:50], table.weight, above)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, table.weight, above)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_segments_and_their_gradients_are_torchs_own(rows):
    segments, table = torch.randint(rows, (40,)), nn.Embedding(rows, 6).double()
    found, expected = lookup._Segments.apply(table.weight, segments), table(segments)
    above = torch.randn_like(expected)
    assert found.equal(expected)
    (gradient,) = torch.autograd.grad(found, table.weight, above)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, table.weight, above)[0], rtol=0, atol=1e-12)
