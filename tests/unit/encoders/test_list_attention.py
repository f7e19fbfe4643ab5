"""Attention of lists against a plain loop over tokens and heads, and whole encoders against rows with a mask."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear
from transformers import BertModel, ModernBertConfig, ModernBertModel

from ranker.encoders.attention import PackedRows
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.kernel_functions import list_tensors, triton_list_kernels
from ranker.encoders.layer import LayerWeights, first_token_attention
from ranker.encoders.list_attention import list_attention
from ranker.encoders.list_average import list_average
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.types import TokenBatch
from tests.assets.interpreter import interpreted

LENGTHS, LISTS = [5, 1, 2, 9, 3, 4], [3, 1, 2]
HEADS, SIZE = 4, 8


def batch(seed: int = 0, list_size: int | None = None) -> TokenBatch:
    tokens = torch.randint(5, 60, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lists = {"lists": torch.tensor(LISTS), "max_list": max(LISTS), "list_size": list_size}
    return TokenBatch(tokens, tokens % 2, ends, max(LENGTHS), **lists)


def read_by(row: int) -> list[int]:
    """The positions that a row reads besides its own: the first tokens of the other rows in its list."""
    starts = [sum(LENGTHS[:other]) for other in range(len(LENGTHS))]
    begin = 0
    for size in LISTS:
        if begin <= row < begin + size:
            return [starts[other] for other in range(begin, begin + size) if other != row]
        begin += size
    raise AssertionError


def added(row: int, list_size: int | None) -> float:
    """What is added to the logits of the other rows' first tokens: log((L - 1) / (n - 1)) in a list of n rows."""
    others = len(read_by(row))
    return 0.0 if list_size is None or not others else math.log(list_size - 1) - math.log(others)


def plain(query, key, value, scale, window=None, list_size=None):
    """softmax(scale q . k) v for each token of each row and head."""
    group, outputs, start = query.shape[1] // key.shape[1], [], 0
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            near = [start + other for other in range(length) if window is None or abs(other - token) <= window]
            read = [*near, *read_by(row)]
            heads = []
            for head in range(query.shape[1]):
                logits = scale * key[read, head // group] @ query[start + token, head]
                shift = torch.zeros(len(read), dtype=logits.dtype)
                shift[len(near) :] = added(row, list_size)
                logits = logits + shift
                heads.append(logits.softmax(0) @ value[read, head // group])
            outputs.append(torch.stack(heads))
        start += length
    return torch.stack(outputs)


def states_and_gradients(attend, *parts):
    leaves = [part.clone().requires_grad_() for part in parts]
    mixed = attend(*leaves)
    (mixed * torch.arange(mixed.numel(), dtype=mixed.dtype).view_as(mixed).sin()).sum().backward()
    return [mixed.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("window", "key_heads", "list_size"), product([None, 2, 20], [4, 2], [None, 2, 7]))
def test_states_and_gradients_are_those_of_a_plain_loop(window, key_heads, list_size):
    """Without a window row by row, with one over padded rows; one of 20 limits nothing."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), n, SIZE, dtype=torch.float64) for n in (HEADS, key_heads, key_heads))
    layout = RaggedLayout.of(batch(list_size=list_size))
    got = states_and_gradients(lambda *p: list_attention(*p, layout, 0.3, window), query, key, value)
    expected = states_and_gradients(lambda *p: plain(*p, 0.3, window, list_size), query, key, value)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def bert():
    return BertModel(tiny_config(dim=16), add_pooling_layer=False)


def modernbert():
    return ModernBertModel(
        ModernBertConfig(
            vocab_size=120, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
            local_attention=6, max_position_embeddings=64, pad_token_id=0, cls_token_id=2, sep_token_id=3,
            bos_token_id=2, eos_token_id=3,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("model", "list_size"), [(bert, None), (bert, 5), (modernbert, None), (modernbert, 5)])
def test_an_encoder_computes_what_transformers_computes_under_a_mask(model, list_size):
    """transformers' own layers on one row [1, tokens] of all texts, with the mask of lists and each row's positions."""
    torch.manual_seed(0)
    whole = model().double().eval()
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    rows = batch(list_size=list_size)
    encoder = Encoder(whole, tiny_tokenizer()).double().eval()
    mask = torch.full((sum(LENGTHS), sum(LENGTHS)), float("-inf"), dtype=torch.float64)
    start = 0
    for row, length in enumerate(LENGTHS):
        mask[start : start + length, start : start + length] = 0
        mask[start : start + length, read_by(row)] = added(row, list_size)
        start += length
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    options = {"position_ids": positions[None], "output_hidden_states": False}
    if model is bert:
        attention = mask[None, None]
        options["token_type_ids"] = rows.segments[None]
    else:  # its layers with a window also see the other rows' first tokens, which have no distance
        distance = (positions[:, None] - positions).abs() <= whole.config.sliding_window
        own = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        near = mask.masked_fill(~distance & (own[:, None] == own), float("-inf"))
        attention = {"full_attention": mask[None, None], "sliding_attention": near[None, None]}
        whole.config._attn_implementation = "sdpa"
    with torch.no_grad():
        expected = whole(rows.tokens[None], attention_mask=attention, **options).last_hidden_state[0]
        got, first = encoder(rows), encoder.pooled(rows, "cls")
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(first, expected[rows.cu_seqlens[:-1].long()], rtol=0, atol=1e-10)


def average_by_row(states, queries, ends, keys, blocks):
    """`first_attention` row by row: averages, base-2 logits of all tokens, and logarithms of the softmax sums."""
    scale = (queries.shape[2] // queries.shape[1]) ** -0.5 / math.log(2)
    parts = [row @ query.T * scale for row, query in zip(states.split(LENGTHS), queries, strict=True)]
    sums = torch.stack([part.exp2().sum(0).log2() for part in parts])
    rows = zip(parts, sums, states.split(LENGTHS), strict=True)
    return torch.stack([(part - of).exp2().T @ row for part, of, row in rows]), torch.cat(parts), sums


def average_by_row_backward(grad_out, average, logits, sums, states, queries, ends, keys, blocks):
    """Gradients of the states and queries by the weights of a row's own tokens, 2 ** (logits - sums)."""
    scale, grads = (queries.shape[2] // queries.shape[1]) ** -0.5, []
    rows = zip(logits.split(LENGTHS), sums, states.split(LENGTHS), grad_out, average, queries, strict=True)
    for part, of, row, above, mean, query in rows:
        weights = (part - of).exp2()
        slopes = weights * (row @ above.T - (above * mean).sum(1)) * scale
        grads.append((weights @ above + slopes @ query, slopes.T @ row))
    return torch.cat([grad for grad, _ in grads]), torch.stack([grad for _, grad in grads])


@pytest.mark.parametrize(("list_size", "largest"), [(None, 2**26), (5, 2**26), (1, 2**26), (5, 1)])
def test_first_tokens_alone_get_the_states_and_gradients_of_attention_between_all_tokens(
    list_size, largest, monkeypatch
):
    """Over states, with the weights multiplied in, beside queries, keys and values of all tokens.

    With `largest` = 1, each list is computed by itself.
    """
    monkeypatch.setattr("ranker.encoders.list_average.LARGEST", largest)
    torch.manual_seed(0)
    layout, dim = RaggedLayout.of(batch(list_size=list_size)), HEADS * SIZE
    bias = {5: [1.0, 1.0, 1.0, 0.0, 2.0, 2.0], 1: [-math.inf] * 3 + [0.0] + [-math.inf] * 2}.get(  # log2((L - 1) / 2)
        list_size, [0.0] * 6
    )
    parts = (
        layout.batch.cu_seqlens[:-1].tolist(),
        [0, 0, 0, 3, 4, 4],
        [3, 3, 3, 4, 6, 6],
        [],
        [],
        bias,
        [[0, 1, 2], [3, -1, -1], [4, 5, -1]],
    )
    tensors = [torch.tensor(part) for part in parts]
    rows = PackedRows(layout.batch.cu_seqlens, layout.cu_keys, None, max(LENGTHS), layout.blocks, tensors)
    by_row = SimpleNamespace(first_attention=average_by_row, first_attention_backward=average_by_row_backward)
    firsts = layout.batch.cu_seqlens[:-1]

    def alone(states, query, key, value):
        layer = LayerWeights(query, zeros, key, zeros, value, zeros, *[zeros] * 10)
        average = partial(list_average, kernels=by_row)
        return first_token_attention(states, layer, HEADS, firsts, average, rows)[0]

    def whole(states, *weights):
        qkv = linear(states, torch.cat(weights)).unflatten(1, (3, HEADS, SIZE))
        return list_attention(*qkv.unbind(1), layout).flatten(1).index_select(0, firsts)

    zeros = torch.zeros(dim, dtype=torch.float64)
    states, *weights = (torch.randn(n, dim, dtype=torch.float64) for n in (sum(LENGTHS), dim, dim, dim))
    parts = states, *(weight * dim**-0.5 for weight in weights)
    for mine, theirs in zip(states_and_gradients(alone, *parts), states_and_gradients(whole, *parts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


KERNELS = """
import torch
from ranker.encoders.kernels.list_attention import attend_lists, attend_lists_backward, list_tensors
from ranker.encoders.list_attention import list_attention
from ranker.encoders.ragged import RaggedLayout
from ranker.types import TokenBatch

torch.manual_seed(0)
heads, size = 1, 16
for lengths, lists, cells in (
    ([5, 66, 160, 3, 62, *[2] * 37, 7], [3, 1, 38], [[0, 1, 2, *[-1] * 35], [3, *[-1] * 37], [*range(4, 42)]]),
    ([66, 130, *[1] * 68, 7], [70], [[*range(70)]]),
):  # the last row is padding, and is of no list
    ends, zeros = torch.tensor([0, *lengths]).cumsum(0).int(), torch.zeros(sum(lengths), dtype=torch.long)
    sizes, most = torch.tensor(lists), max(lists)
    every = torch.tensor([*lists, 1])
    layout = RaggedLayout.of(TokenBatch(zeros, zeros, ends, max(lengths), lists=every, max_list=most, list_size=4))
    tensors = list_tensors(sizes, most, ends, layout.row_indices, 4)
    assert tensors.cells.tolist() == cells
    qkv, grad_out = torch.randn(sum(lengths), 3, heads, size), torch.randn(sum(lengths), heads, size)
    states = qkv.double().requires_grad_()
    expected = list_attention(*states.unbind(1), layout)
    expected.backward(grad_out.double())
    out, sums = attend_lists(qkv, ends, ends, layout.blocks, *tensors)
    grad, bias = attend_lists_backward(grad_out, qkv, out, sums, ends, ends, layout.blocks, *tensors)
    assert (out - expected).abs().max() < 2e-6, (out - expected).abs().max()
    assert (grad - states.grad).abs().max() < 5e-6, (grad - states.grad).abs().max()
    assert (bias - states.grad.sum(0).flatten()).abs().max() < 1e-4
"""


def test_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    interpreted(lambda: exec(KERNELS, {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize("output", ["all", "first"])
def test_the_kernels_equal_float64_and_repeat_their_bits(output):
    """States and gradients of a BERT in bf16 through the kernels, beside float64 with padding."""
    torch.manual_seed(0)
    config = tiny_config(dim=128)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    lengths = [87] * 40 + [5, 130, 3, 64] + [30] + [100, 200, *[9] * 68]
    tokens = torch.randint(5, 60, (sum(lengths),))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    lists = torch.tensor([40, 4, 1, 70])
    rows = TokenBatch(tokens, tokens % 2, ends, max(lengths), lists=lists, max_list=70, list_size=8).to("cuda")
    model = BertModel(config, add_pooling_layer=False).cuda()
    with_kernels = Encoder(model, tiny_tokenizer())
    without = Encoder(model, tiny_tokenizer(), Execution(fused=False, compile=False))

    def run(encoder: Encoder, half: bool = True) -> list[torch.Tensor]:
        encoder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            states = encoder.pooled(rows, "cls") if output == "first" else encoder(rows)
            (states.double() * torch.arange(states.numel(), device="cuda").view_as(states).sin()).sum().backward()
        return [states.detach().double(), *(p.grad.double() for p in encoder.parameters() if p.grad is not None)]

    one, again, plain = run(with_kernels), run(with_kernels), run(without)
    assert all(torch.equal(mine, other) for mine, other in zip(one, again, strict=True))
    model.double()
    exact = run(without, half=False)
    noise = 1e-4 * max(theirs.norm() for theirs in exact)  # the gradients of the keys' biases are 0
    for mine, other, theirs in zip(one, plain, exact, strict=True):
        bound = 0.01 * theirs.norm() + noise + 2 * (other - theirs).norm()  # torch's own sums in bf16 round as well
        assert (mine - theirs).norm() <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize(("size", "list_size"), product([16, 64, 128], [None, 8]))
def test_list_attention_of_the_kernels_equals_float64_and_repeats_its_bits(size, list_size):
    """Lists longer than a block of keys; rows longer than a tile; tiles with and without room for the other rows."""
    torch.manual_seed(size)
    # the last row is padding, and is of no list
    lengths = [*[87] * 40, 64, 128, 129, 320, 1, 60, 120, *[3] * 45, 50, 7]
    lists = torch.tensor([40, 6, 1, 46, 1], device="cuda")
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    zeros = torch.zeros(sum(lengths), dtype=torch.long, device="cuda")
    options = {"lists": lists, "max_list": 46, "list_size": list_size}
    layout = RaggedLayout.of(TokenBatch(zeros, zeros, ends, max(lengths), **options))
    rows = (ends, ends, layout.blocks, *list_tensors(lists[:-1], 46, ends, layout.row_indices, list_size))
    qkv = torch.randn(sum(lengths), 3, 2, size, device="cuda").bfloat16()
    above = torch.randn(sum(lengths), 2, size, device="cuda").bfloat16()
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN

    def run():
        kernels = triton_list_kernels()
        out, sums = kernels.attend(qkv, *rows)
        return out, *kernels.attend_backward(above, qkv, out, sums, *rows)

    exact = qkv.double().requires_grad_()
    expected = list_attention(*exact.unbind(1), layout)
    expected.backward(above.double())
    (out, grad, summed), again = run(), run()
    assert all(torch.equal(mine, other) for mine, other in zip((out, grad, summed), again, strict=True))
    pairs = [(out, expected), *zip(grad.unbind(1), exact.grad.unbind(1), strict=True)]
    pairs += zip(summed.view(3, -1)[[0, 2]], exact.grad.sum(0).flatten(1)[[0, 2]], strict=True)  # that of keys is 0
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()
