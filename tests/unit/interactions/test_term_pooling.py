"""Term weights by blocks equal the plain formula on the whole [tokens, words] tensor, gradients too."""

import pytest
import torch

from ranker.interactions import term_blocks
from ranker.interactions.term_pooling import term_weights
from ranker.types import TokenBatch

LENGTHS = [3, 1, 7, 2, 5, 4]
WORDS, DIM = 23, 6


def batch_of(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return TokenBatch(tokens, tokens, offsets, max(lengths))


def plain(inputs, matrix, bias, lengths, pooling, activation):
    """The formula, with all logits at once."""
    logits = inputs @ matrix.T + (0 if bias is None else bias)
    values = torch.log1p(torch.relu(logits))
    if activation == "log1p_relu":
        values = torch.log1p(values)
    rows = values.split(lengths)
    return torch.stack([row.max(0).values if pooling == "max" else row.sum(0) for row in rows])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(term_blocks, "CPU_TOKENS", 8)
    monkeypatch.setattr(term_blocks, "CPU_WORDS", 10)
    monkeypatch.setattr(term_blocks, "CPU_ENTRIES", 7)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_blocks_equal_the_plain_formula_and_its_gradients(small_blocks, pooling, activation, has_bias):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = [draw(sum(LENGTHS), DIM), draw(WORDS, DIM), *([draw(WORDS)] if has_bias else [])]
    upstream = draw(len(LENGTHS), WORDS)
    results = []
    for compute in (
        lambda inputs, matrix, bias: term_weights(inputs, matrix, bias, batch_of(LENGTHS), pooling, activation),
        lambda inputs, matrix, bias: plain(inputs, matrix, bias, LENGTHS, pooling, activation),
    ):
        leaves = [value.clone().requires_grad_() for value in values]
        out = compute(*leaves, *([] if has_bias else [None]))
        results.append([out, *torch.autograd.grad((out * upstream).sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    assert (results[0][0] == 0).any() and (results[0][0] > 0).any()
    with torch.no_grad():  # another way through the code, which keeps no tokens
        inputs, matrix, *bias = values
        again = term_weights(inputs, matrix, bias[0] if bias else None, batch_of(LENGTHS), pooling, activation)
        torch.testing.assert_close(again, results[1][0], rtol=0, atol=1e-9)


def test_values_by_hand():
    # two texts; word 0 reads the first coordinate, word 1 the second minus 1
    inputs, matrix = torch.tensor([[1.0, 0.0], [3.0, 2.0], [-1.0, 1.0]]), torch.eye(2)
    bias = torch.tensor([0.0, -1.0])
    largest = term_weights(inputs, matrix, bias, batch_of([2, 1]), "max", "relu")
    torch.testing.assert_close(largest.expm1(), torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
    sums = term_weights(inputs, matrix, bias, batch_of([2, 1]), "sum", "relu")
    torch.testing.assert_close(sums.exp(), torch.tensor([[2.0 * 4.0, 2.0], [1.0, 1.0]]))


def test_logits_of_all_tokens_and_words_never_exist(monkeypatch):
    sizes = []
    real = term_blocks._logits

    def watched(inputs, matrix, bias):
        logits = real(inputs, matrix, bias)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(term_blocks, "_logits", watched)
    lengths = [50] * 60  # 3,000 tokens
    inputs, matrix = torch.randn(3000, 4, requires_grad=True), torch.randn(2000, 4, requires_grad=True)
    for pooling in ("max", "sum"):
        term_weights(inputs, matrix, None, batch_of(lengths), pooling, "relu").sum().backward()
    assert max(sizes) <= term_blocks.CPU_TOKENS * term_blocks.CPU_WORDS < 3000 * 2000


def test_half_precision_is_computed_under_autocast_and_returned_in_full():
    inputs, matrix = torch.randn(7, 16), torch.randn(11, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = term_weights(inputs, matrix, None, batch_of([4, 3]), "max", "relu")
    exact = plain(inputs, matrix, None, [4, 3], "max", "relu")
    assert got.dtype == torch.float32
    assert 1e-6 < (got - exact).abs().max() < 0.05
