"""Causal attention with grouped heads: the kernel and torch's operator against float64, row by row."""

import pytest
import torch

from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.types import TokenBatch
from tests.assets.interpreter import interpreted


def layout_of(lengths: list[int]) -> RaggedLayout:
    ends, zeros = torch.tensor([0, *lengths]).cumsum(0).int(), torch.zeros(sum(lengths), dtype=torch.long)
    return RaggedLayout.of(TokenBatch(zeros, zeros, ends, max(lengths)))


def plain(query, key, value, lengths, scale, window=-1):
    """softmax(scale q . k) v over a token's own row, up to itself, for each head of each row."""
    group, rows = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
        distance = torch.arange(len(q), device=q.device).unsqueeze(1) - torch.arange(len(q), device=q.device)
        read = (distance >= 0) & ((distance <= window) if window >= 0 else True)
        heads = []
        for head in range(query.shape[1]):
            logits = scale * q[:, head] @ k[:, head // group].T
            heads.append(logits.masked_fill(~read, float("-inf")).softmax(-1) @ v[:, head // group])
        rows.append(torch.stack(heads, 1))
    return torch.cat(rows)


KERNELS = """
import torch
from ranker.encoders.kernels.grouped_attention import attend
from ranker.encoders.kernels.grouped_attention_backward import attend_backward
from tests.unit.encoders.test_grouped_attention import layout_of, plain

lengths = [5, 66, 130, 1, 64]
layout = layout_of(lengths)
ends, blocks, tokens = layout.batch.cu_seqlens, layout.blocks, sum(lengths)
for window in (-1, 40):
    torch.manual_seed(0)
    parts = [torch.randn(tokens, 2, 64), torch.randn(tokens, 3, 1, 64)[:, 1], torch.randn(tokens, 1, 64)]
    grad_out = torch.randn(tokens, 2, 64)
    leaves = [part.double().requires_grad_() for part in parts]
    expected = plain(*leaves, lengths, 0.2, window)
    expected.backward(grad_out.double())
    out, sums = attend(*parts, ends, blocks, 0.2, window)
    assert (out - expected).abs().max() < 4e-6, (out - expected).abs().max()
    for grad, leaf in zip(attend_backward(grad_out, *parts, out, sums, ends, blocks, 0.2, window), leaves):
        assert (grad - leaf.grad).abs().max() < 2e-5, (grad - leaf.grad).abs().max()
"""


def test_the_kernel_computes_the_same_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    interpreted(lambda: exec(KERNELS, {}))


def shared(groups: list[tuple[int, list[int]]]) -> tuple[SharedPrefixes, list[list[int]]]:
    """Groups of (length of the prefix, lengths of the rests), cut into segments; indices of each whole row's tokens."""
    vocabulary, rows, sizes = iter(range(10**6)), [], []
    for prefix, rests in groups:
        common = [next(vocabulary) for _ in range(prefix)]
        rows += [common + [next(vocabulary) for _ in range(rest)] for rest in rests]
        sizes.append(len(rests))
    tokens = torch.tensor([token for row in rows for token in row])
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    prefixes = SharedPrefixes.of(TokenBatch(tokens, torch.zeros_like(tokens), ends, max(map(len, rows))), sizes)
    found = {int(token): number for number, token in enumerate(prefixes.batch.tokens)}
    return prefixes, [[found[token] for token in row] for row in rows]


def whole_rows(query, key, value, rows, scale):
    """`plain` over whole rows; each token of a prefix keeps the output that it has in its first row."""
    out = {}
    for row in rows:
        mixed = plain(query[row], key[row], value[row], [len(row)], scale)
        for token, state in zip(row, mixed, strict=True):
            out.setdefault(token, state)
    return torch.stack([out[token] for token in range(len(query))])


def test_blocks_name_the_prefix_and_the_last_reader_of_each_segment():
    prefixes, _ = shared(GROUPS)
    ends, keys, starts = prefixes.batch.cu_seqlens.tolist(), prefixes.key_indices.tolist(), prefixes.cu_keys.tolist()
    seen = set()
    for segment, begin, prefix, length, readers in prefixes.blocks.tolist():
        own = range(ends[segment], ends[segment + 1])
        seen |= {own[begin + i] for i in range(min(64, len(own) - begin))}
        assert [*range(prefix, prefix + length), *own] == keys[starts[segment] : starts[segment + 1]]
        reading = [other for other in range(len(ends) - 1) if own[0] in keys[starts[other] : starts[other + 1]]]
        assert reading == list(range(reading[0], reading[-1] + 1)) and readers == ends[reading[-1] + 1]
    assert seen == set(range(ends[-1]))


GROUPS = [(7, [5, 130, 64]), (66, [1, 63]), (0, [40, 70]), (64, [65, 3]), (9, [20])]  # a single row shares nothing

PREFIXES = """
import torch
from ranker.encoders.kernels.grouped_attention import attend
from ranker.encoders.kernels.grouped_attention_backward import attend_backward
from tests.unit.encoders.test_grouped_attention import GROUPS, shared, whole_rows

prefixes, rows = shared(GROUPS)
ends, blocks, tokens = prefixes.batch.cu_seqlens, prefixes.blocks, prefixes.batch.num_tokens
torch.manual_seed(0)
parts = [torch.randn(tokens, 2, 64), torch.randn(tokens, 3, 1, 64)[:, 1], torch.randn(tokens, 1, 64)]
grad_out = torch.randn(tokens, 2, 64)
leaves = [part.double().requires_grad_() for part in parts]
expected = whole_rows(*leaves, rows, 0.2)
expected.backward(grad_out.double())
out, sums = attend(*parts, ends, blocks, 0.2)
assert (out - expected).abs().max() < 4e-6, (out - expected).abs().max()
for grad, leaf in zip(attend_backward(grad_out, *parts, out, sums, ends, blocks, 0.2), leaves):
    assert (grad - leaf.grad).abs().max() < 3e-5, (grad - leaf.grad).abs().max()
"""


def test_the_kernel_reads_shared_prefixes_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    interpreted(lambda: exec(PREFIXES, {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize("short", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(16, 8, 128), (9, 3, 64), (4, 4, 64)])
def test_shared_prefixes_on_a_gpu(heads, key_heads, dim, short):
    from ranker.encoders.grouped_attention import grouped_attention

    prefixes, rows = shared([*GROUPS, *[(60, [120, 90, 27, 121] * 2)] * 6, (40, [30] * 32), (300, [200, 212, 1])])
    tokens, scale = prefixes.batch.num_tokens, dim**-0.5
    torch.manual_seed(0)
    shapes = ((heads, dim), (key_heads, dim), (key_heads, dim))
    parts = [torch.randn(tokens, *shape, device="cuda").bfloat16() for shape in shapes]
    above = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    ends, keys, indices = (part.cuda() for part in (prefixes.batch.cu_seqlens, prefixes.cu_keys, prefixes.key_indices))

    def ours(query, key, value):
        if not short:
            key, value = key[indices], value[indices]
        return grouped_attention(
            query, key, value, ends, keys, prefixes.blocks.cuda(), 512, short, True, -1, scale
        )[0]  # fmt: skip

    got, again, expected = (gradients_of(attend, states, upstream) for attend, states, upstream in (
        (ours, parts, above), (ours, parts, above),
        (lambda *states: whole_rows(*states, rows, scale), [part.double() for part in parts], above.double()),
    ))  # fmt: skip
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (mine.double() - theirs).norm() <= 0.01 * theirs.norm(), number
    if short:
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


def gradients_of(attend, states, upstream):
    """The output of a function, and the gradients of its inputs."""
    leaves = [part.detach().clone().requires_grad_() for part in states]
    mixed = attend(*leaves)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize("short", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(16, 8, 128), (9, 3, 64), (4, 4, 64), (8, 1, 128)])
def test_both_ways_on_a_gpu(heads, key_heads, dim, window, short):
    from ranker.encoders.grouped_attention import grouped_attention

    lengths = [87] * 20 + [5, 66, 130, 1, 64, 128, 129, 512, 300, 63]
    layout = layout_of(lengths)
    tokens, scale = sum(lengths), dim**-0.5
    torch.manual_seed(0)
    shapes = ((heads, dim), (key_heads, dim), (key_heads, dim))
    parts = [torch.randn(tokens, *shape, device="cuda").bfloat16() for shape in shapes]
    above = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    ends, blocks = layout.batch.cu_seqlens.cuda(), layout.blocks.cuda()

    def ours(*states):
        return grouped_attention(*states, ends, ends, blocks, 512, short, True, window, scale)[0]

    got, again = (gradients_of(ours, parts, above) for _ in range(2))
    expected = gradients_of(
        lambda *states: plain(*states, lengths, scale, window), [part.double() for part in parts], above.double()
    )
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (mine.double() - theirs).norm() <= 0.01 * theirs.norm(), number
    if short:
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
