"""Gradients of small tables, summed in a fixed order, equal those of torch's own lookup."""

import pytest
import torch
from torch import nn

from ranker.encoders import embeddings
from ranker.encoders.ragged import RaggedLayout, pad_to_tiles
from ranker.types import TokenBatch


def layout_of(lengths: list[int], padded: bool = False) -> RaggedLayout:
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    batch = TokenBatch(ids, ids, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    return RaggedLayout.of(pad_to_tiles(batch) if padded else batch)


@pytest.mark.parametrize("group", [1, 2, 256])
@pytest.mark.parametrize("lengths", [[3], [3, 1, 5], [2, 0, 4, 4, 1, 0], [64, 3]])
def test_sums_by_position_worked_out_by_hand(monkeypatch, group, lengths):
    monkeypatch.setattr(embeddings, "GROUP_ROWS", group)
    values = torch.randn(sum(lengths), 4, dtype=torch.float64)
    rows = values.split(lengths)
    expected = [
        sum((row[position] for row in rows if len(row) > position), torch.zeros(4, dtype=torch.float64))
        for position in range(max(lengths))
    ]
    for extra in (0, 9):
        got = embeddings.position_sums(values, layout_of(lengths), max(lengths) + extra)
        torch.testing.assert_close(got[: max(lengths)], torch.stack(expected), rtol=0, atol=1e-12)
        assert not got[max(lengths) :].any()


def test_values_in_half_precision_are_summed_in_float32():
    lengths = [2] * 300  # one by one in bfloat16, 256 + 1 is 256
    assert embeddings.position_sums(torch.ones(600, 1, dtype=torch.bfloat16), layout_of(lengths), 3).tolist() == [
        [300.0],
        [300.0],
        [0.0],
    ]


@pytest.mark.parametrize("first_position", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_positions_and_their_gradients_are_torchs_own(first_position, padded):
    torch.manual_seed(0)
    layout = layout_of([7, 30, 1, 12], padded)
    table = nn.Embedding(50, 6).double()
    layout.batch.max_length = 2  # a CUDA graph keeps the value of another batch
    got = embeddings._PositionEmbedding.apply(table.weight, layout, first_position)
    expected = table(layout.position_ids[:50] + first_position)
    above = torch.randn_like(expected)
    assert got[:50].equal(expected)
    (gradient,) = torch.autograd.grad(got[:50], table.weight, above)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, table.weight, above)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_segments_and_their_gradients_are_torchs_own(rows):
    segments, table = torch.randint(rows, (40,)), nn.Embedding(rows, 6).double()
    got, expected = embeddings._SegmentEmbedding.apply(table.weight, segments), table(segments)
    above = torch.randn_like(expected)
    assert got.equal(expected)
    (gradient,) = torch.autograd.grad(got, table.weight, above)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, table.weight, above)[0], rtol=0, atol=1e-12)
