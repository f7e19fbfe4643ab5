"""Dropout by hash: the right share, no pattern, and masks that depend only on a value's place in the step."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.loading import load_encoder
from ranker.hashing import mix
from ranker.types import TokenBatch

ROWS, LENGTH, DIM = 64, 32, 96


def kept(seed: int, rate: float, sites: int = 2) -> torch.Tensor:
    """Which values are kept, bool [sites, rows, positions, columns]."""
    row_ids, positions = (
        part.flatten() for part in torch.meshgrid(torch.arange(ROWS), torch.arange(LENGTH), indexing="ij")
    )
    keys = dropout_hashes(seed, row_ids, positions, sites)
    return torch.stack([hashed_dropout(torch.ones(len(row_ids), DIM), key, rate) != 0 for key in keys]).view(
        sites, ROWS, LENGTH, DIM
    )


def lowbias32(number: int) -> int:
    """The published function with Python's integers."""
    number ^= number >> 16
    number = number * 0x7FEB352D % 2**32
    number ^= number >> 15
    number = number * 0x846CA68B % 2**32
    return number ^ (number >> 16)


def test_masks_are_the_hash_worked_out_by_hand() -> None:
    seed, row_id, position, column = 5 + (9 << 32), 7, 3, 11
    row = lowbias32((row_id * 0x7FEB352D + 5) % 2**32)
    token = lowbias32(row ^ (position * 0x85EBCA77 + 9) % 2**32)
    for site in range(2):
        key = lowbias32(token ^ (site + 1) * 0xC2B2AE3D % 2**32)
        keys = dropout_hashes(seed, torch.tensor([row_id]), torch.tensor([position]), 2)
        assert int(keys[site]) % 2**32 == key
        # a signed number, counted from the smallest
        drawn = lowbias32((key + column * 0x9E3779B1) % 2**32) ^ 2**31
        for rate in (0.1, 0.5, drawn / 2**32 - 1e-4, drawn / 2**32 + 1e-4):
            value = float(hashed_dropout(torch.ones(1, DIM, dtype=torch.float64), keys[site], rate)[0, column])
            # the finaliser's last shift changes the lower half of the bits only
            assert value == pytest.approx(1 / (1 - rate) if drawn >= rate * 2**32 else 0)


@pytest.mark.parametrize("seed", [0, 5 + (9 << 32), 2**31, 2**32 - 1, 2**63 - 1, -7])
def test_a_seed_on_the_device_is_the_same_seed(seed: int) -> None:
    row_ids, positions = torch.arange(40) // 8, torch.arange(40) % 8
    on_device = dropout_hashes(torch.tensor(seed), row_ids, positions, 3)
    assert on_device.equal(dropout_hashes(seed, row_ids, positions, 3))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_shares_and_independence(rate: float) -> None:
    """Shares and pairs are as in independent draws, for seeds of a training.

    Bounds: 5 standard errors; chi-squared at one in a million.
    """
    for step in range(3):
        mask = kept(int(mix(0, 0, step)), rate)
        drops = (~mask).double()
        for axes in ((), (0,), (1,), (2,), (3,)):  # all values; each site, row, position and column
            others = [axis for axis in range(4) if axis not in axes]
            share = drops.mean(dim=others)
            count = drops.numel() / share.numel()
            assert ((share - rate) / (rate * (1 - rate) / count) ** 0.5).abs().max() < 5
        for axis in range(4):  # neighbours, and values a power of two apart
            for gap in [1, 2, 8, 16][: 1 if axis == 0 else 4]:
                size = mask.shape[axis] - gap
                one, other = mask.narrow(axis, 0, size), mask.narrow(axis, gap, size)
                table = np.array([[float((a & b).sum()) for b in (other, ~other)] for a in (one, ~one)])
                expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
                assert ((table - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 1)
    assert not kept(1, rate).equal(kept(2, rate)) and not kept(1, rate).equal(kept(1 + 2**32, rate))


def test_scaling_keeps_the_mean_and_gradients_follow_the_mask() -> None:
    keys = dropout_hashes(3, torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 1)[0]
    values = torch.full((2000, DIM), 2.0, dtype=torch.float64, requires_grad=True)
    dropped = hashed_dropout(values, keys, 0.25)
    assert dropped.unique().tolist() == pytest.approx([0.0, 2 / 0.75])
    assert abs(float(dropped.detach().mean()) - 2.0) < norm.ppf(1 - 1e-6) * 2 * (0.25 / 0.75 / dropped.numel()) ** 0.5
    dropped.sum().backward()
    assert values.grad.equal(dropped.detach() / 2)


def batch_of(rows: list[list[int]], row_ids: list[int] | None) -> TokenBatch:
    tokens = torch.tensor([token for row in rows for token in row])
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    return TokenBatch(
        tokens,
        torch.zeros_like(tokens),
        ends,
        max(map(len, rows)),
        row_ids=None if row_ids is None else torch.tensor(row_ids),
    )


def test_an_encoders_dropout_depends_on_row_ids() -> None:
    encoder = load_encoder("tiny", dropout=0.3, attention_dropout=0.0).double()
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    encoder.dropout_seed = 4
    whole = encoder(batch_of(rows, [20, 31, 42]))
    apart = [encoder(batch_of([row], [row_id])) for row, row_id in zip(rows, (20, 31, 42), strict=True)]
    assert whole.allclose(torch.cat(apart), atol=1e-12), "one row per batch"
    turned = encoder(batch_of([rows[2], rows[0]], [42, 20]))
    assert turned.allclose(torch.cat([apart[2], apart[0]]), atol=1e-12), "in another order"
    assert not whole.allclose(encoder(batch_of(rows, [20, 31, 43])), atol=1e-3), "another row id, another mask"
    encoder.dropout_seed = 5
    assert not whole.allclose(encoder(batch_of(rows, [20, 31, 42])), atol=1e-3), "another step"
    encoder.dropout_seed = None
    torch.manual_seed(0)
    one, other = encoder(batch_of(rows, None)), encoder(batch_of(rows, None))
    torch.manual_seed(0)
    assert not one.allclose(other, atol=1e-3) and encoder(batch_of(rows, None)).equal(one), "no seed: it draws one"
    encoder.eval()
    assert encoder(batch_of(rows, [20, 31, 42])).equal(encoder(batch_of(rows, None)))


class Site(torch.nn.Module):
    """Replaces a dropout module of transformers' model: hashed dropout at one site."""

    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return hashed_dropout(states[0], self.keys, 0.3).unsqueeze(0)


def test_values_are_dropped_where_transformers_drops_them() -> None:
    encoder = load_encoder("tiny", dropout=0.3, attention_dropout=0.0)
    encoder.dropout_seed = 6
    row = [5, 6, 7, 8, 9]
    ours = encoder(batch_of([row], [13]))
    model = encoder.model
    sites = iter(dropout_hashes(6, torch.full((5,), 13), torch.arange(5), 1 + 2 * encoder.num_layers))
    model.embeddings.dropout = Site(next(sites))
    for layer in model.encoder.layer:
        layer.attention.output.dropout, layer.output.dropout = Site(next(sites)), Site(next(sites))
    theirs = model(torch.tensor([row])).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
