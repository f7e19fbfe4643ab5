"""Pooling: values computed by hand, and those of sentence-transformers' own module."""

import pytest
import torch

from ranker.interactions.pooling import POOLINGS, pool
from ranker.types import TokenBatch

LENGTHS = (4, 1, 6)


def batch_of(attended=None) -> TokenBatch:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    tokens = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    return TokenBatch(
        tokens, tokens, cu_seqlens, max(LENGTHS), None if attended is None else torch.tensor(attended).int()
    )


@pytest.mark.parametrize(("pooling", "expected"), [
    ("cls", [1.0, 10.0, -2.0]),
    ("last", [6.0, 10.0, 9.0]),
    ("mean", [3.25, 10.0, 3.0]),
    ("max", [6.0, 10.0, 9.0]),
    ("weightedmean", [(1 + 2 * 2 + 3 * 4 + 4 * 6) / 10, 10.0, (-2 + 0 + 3 * 3 + 4 * 2 + 5 * 6 + 6 * 9) / 21]),
])  # fmt: skip
def test_a_row_is_pooled_as_by_hand(pooling, expected):
    states = torch.tensor([1.0, 2, 4, 6, 10, -2, 0, 3, 2, 6, 9]).unsqueeze(1)
    assert pool(states, batch_of(), pooling).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("attended", [None, (3, 1, 5)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_is_pooled_as_by_sentence_transformers(pooling, attended, skipped):
    pooling_module = pytest.importorskip("sentence_transformers.sentence_transformer.modules").Pooling
    torch.manual_seed(0)
    states, batch = torch.randn(sum(LENGTHS), 5, dtype=torch.float64, requires_grad=True), batch_of(attended)
    rows = states.split(LENGTHS)
    if skipped:  # a row of one token has nothing after a prompt
        lengths, rows = (LENGTHS[0], LENGTHS[2]), (rows[0], rows[2])
        states = torch.cat(rows).detach().requires_grad_()
        rows = states.split(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        left = None if attended is None else batch.attended[[0, 2]]
        batch = TokenBatch(batch.tokens[:10], batch.tokens[:10], cu_seqlens, 6, left)
    mask = torch.arange(6).unsqueeze(0) < (batch.cu_seqlens.diff() if attended is None else batch.attended).unsqueeze(1)
    name = {"last": "lasttoken"}.get(pooling, pooling)
    features = {
        "token_embeddings": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
        "attention_mask": mask.long(),
        **({"prompt_length": skipped} if skipped else {}),
    }
    expected = pooling_module(5, name, include_prompt=not skipped)(features)["sentence_embedding"]
    mine = pool(states, batch, pooling, skipped)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12 if pooling != "weightedmean" else 1e-9)
    weights = torch.randn_like(mine)
    gradients = [torch.autograd.grad((out * weights).sum(), states)[0] for out in (mine, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_weights_of_late_positions_are_exact_in_half_precision():
    states = torch.zeros(3000, 1, dtype=torch.bfloat16)
    states[-1] = 1.0
    tokens = torch.zeros(3000, dtype=torch.int64)
    batch = TokenBatch(tokens, tokens, torch.tensor([0, 3000]).int(), 3000)
    assert pool(states, batch, "weightedmean").item() == pytest.approx(2 / 3001, rel=2**-8)


def test_an_unknown_pooling():
    with pytest.raises(ValueError, match="expected one of cls, mean, max, last, weightedmean, got 'avg'"):
        pool(torch.zeros(11, 1), batch_of(), "avg")
