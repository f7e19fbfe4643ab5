"""ModernBERT's CUDA path against float64 and against the padded float32 path.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/unit/encoders/test_gpu_pre_norm.py
"""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm
from transformers import ModernBertConfig, ModernBertModel

from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.embeddings import fused_word_embedding
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.graphs import Graphs
from ranker.encoders.pre_norm_kernels import triton_pre_norm_kernels
from ranker.encoders.pre_norm_layer import Rotary, rotated
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
]
SIZES = [(1, 64), (1003, 768), (5003, 384), (130, 1024), (65, 2048)]


def error(got, expected) -> float:
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


def poison() -> None:
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN


def hashes_of(tokens: int, rate: float) -> torch.Tensor | None:
    numbers = torch.arange(tokens, device="cuda")
    return dropout_hashes(3, numbers, numbers, 1)[0] if rate else None


def dropped(values, hashes, rate):
    return values if hashes is None else hashed_dropout(values, hashes.clone(), rate)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "dim"), SIZES)
def test_sums_and_their_norms_equal_float64(rate, tokens, dim):
    torch.manual_seed(dim)
    x, residual, hashes = half(tokens, dim), half(tokens, dim), hashes_of(tokens, rate)
    gain = torch.randn(dim, device="cuda", requires_grad=True)
    kernels = triton_pre_norm_kernels(short=True).add_norm
    poison()
    with torch.no_grad():
        got = kernels.add_norm(x, residual, hashes, rate, gain, 1e-5)
    exact = [value.detach().double().requires_grad_() for value in (x, residual, gain)]
    summed = dropped(exact[0], hashes, rate) + exact[1]
    expected = (summed, layer_norm(summed, (dim,), exact[2], None, 1e-5))
    for own, right in zip(got, expected, strict=True):
        assert error(own, right) < 5e-3
    above = [torch.randn_like(own) for own in got]
    rights = torch.autograd.grad(expected, exact, [value.double() for value in above])
    with torch.no_grad():
        grads = kernels.add_norm_backward(above[1], above[0], got[0], hashes, rate, gain, 1e-5)
    for own, right in zip(grads, rights, strict=True):
        assert own.shape == right.shape and error(own, right) < 5e-3


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 96), (1003, 1152), (130, 2624), (5003, 1024)])
def test_gated_gelu_equals_float64(rate, tokens, dim):
    torch.manual_seed(dim)
    wide, above, hashes = half(tokens, 2 * dim), half(tokens, dim), hashes_of(tokens, rate)
    exact = wide.detach().double().requires_grad_()
    inner, gate = exact.chunk(2, -1)
    expected = dropped(gelu(inner) * gate, hashes, rate)
    kernels = triton_pre_norm_kernels(short=True).gated_activation
    poison()
    with torch.no_grad():
        assert error(kernels.gated(wide, "gelu", hashes, rate), expected) < 3e-3
        gradient = kernels.gated_backward(above, wide, "gelu", hashes, rate)
    assert error(gradient, torch.autograd.grad(expected, exact, above.detach().double())[0]) < 5e-3


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_word_embeddings_equal_float64(rate):
    torch.manual_seed(0)
    words = torch.nn.Embedding(500, 768, padding_idx=3, device="cuda")
    norm = torch.nn.LayerNorm(768, bias=False, device="cuda")
    torch.nn.init.normal_(norm.weight)
    tokens, hashes = torch.randint(0, 500, (3001,), device="cuda"), hashes_of(3001, rate)
    poison()
    got = fused_word_embedding(words, norm, tokens, (hashes, rate), torch.bfloat16)
    table, gain = words.weight.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    looked_up = torch.nn.functional.embedding(tokens, table, 3)
    expected = dropped(layer_norm(looked_up, (768,), gain, None, norm.eps), hashes, rate)
    assert error(got, expected) < 3e-3
    above = torch.randn_like(got)
    for own, right in zip(
        torch.autograd.grad(got, (words.weight, norm.weight), above),
        torch.autograd.grad(expected, (table, gain), above.double()),
        strict=True,
    ):
        assert error(own, right) < 5e-3


@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (3, 32), (2, 128)])
def test_rotation_equals_float64_and_turns_back(heads, dim):
    positions = torch.arange(2000, device="cuda") % 700
    angles = torch.arange(700, device="cuda").unsqueeze(1) / 100 ** (torch.arange(dim // 2, device="cuda") * 2 / dim)
    turns = Rotary(angles.cos(), angles.sin(), positions)
    qkv = half(2000, 3, heads, dim).detach()
    kernels = triton_pre_norm_kernels(short=True).rotation
    got = kernels.rotate_(qkv.clone(), *turns)
    assert error(got, rotated(qkv.float(), turns)) < 3e-3
    assert got[:, 2].equal(qkv[:, 2])
    assert error(kernels.rotate_(got, *turns, back=True), qkv) < 5e-3


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("partly", [False, True])
def test_attention_in_windows_equals_float64(window, dim, partly):
    torch.manual_seed(dim)
    lengths = [1, 63, 64, 65, 128, 200, 300, 512, *torch.randint(1, 700, (8,)).tolist(), 0]
    attended = [int(torch.randint(1, length + 1, ())) if partly and length else length for length in lengths]
    ends, cu_keys = (torch.tensor([0, *counts]).cumsum(0).int().cuda() for counts in (lengths, attended))
    nothing = torch.zeros(sum(lengths), dtype=torch.long, device="cuda")
    blocks = RaggedLayout.of(TokenBatch(nothing, nothing, ends, max(lengths))).blocks
    qkv, above = half(sum(lengths), 3, 4, dim).detach(), half(sum(lengths), 4, dim).detach()
    exact, outputs = qkv.double().requires_grad_(), []
    for row, count in zip(exact.split(lengths), attended, strict=True):
        query, key, value = row.unbind(1)
        places = torch.arange(len(row), device="cuda")
        mask = (places < count).expand(len(row), len(row))
        if window is not None:
            mask = mask & ((places.unsqueeze(1) - places).abs() <= window)
        some = mask.any(1)
        logits = torch.einsum("ihd,jhd->hij", query, key) * dim**-0.5
        weights = logits.masked_fill(~(mask | ~some.unsqueeze(1)), -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, value) * some[:, None, None])
    expected = torch.cat(outputs)
    right = torch.autograd.grad(expected, exact, above.double())[0]
    kernels = triton_pre_norm_kernels(short=True)
    poison()
    mixed, sums = kernels.attention.attend(qkv, ends, cu_keys, blocks, window=window)
    assert error(mixed, expected) < 1e-2
    for bias in (False, True):
        poison()
        own, total = kernels.attention_backward.attend_backward(
            above, qkv, mixed, sums, ends, cu_keys, blocks, window=window, bias=bias
        )
        for part in range(3):
            assert error(own[:, part], right[:, part]) < 1e-2
        assert error(total, right.sum(0).flatten()) < 1e-2 if bias else total.numel() == 0
    angles = torch.randn(max(lengths), dim // 2, device="cuda")
    positions = RaggedLayout.of(TokenBatch(nothing, nothing, ends, max(lengths))).position_ids
    turned, _ = kernels.attention_backward.attend_backward(
        above, qkv, mixed, sums, ends, cu_keys, blocks, window=window, bias=False, angles=(angles.cos(), angles.sin())
    )
    unturned = rotated(right.float(), Rotary(angles.cos(), -angles.sin(), positions))
    for part in range(3):
        assert error(turned[:, part], unturned[:, part]) < 1e-2


def model_of(**options) -> ModernBertModel:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=120, hidden_size=256, intermediate_size=384, num_attention_heads=4,
        pad_token_id=0, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3,
        **{"num_hidden_layers": 6, "embedding_dropout": 0.1, "mlp_dropout": 0.1, "attention_dropout": 0.1,
           "local_attention": 32, **options},
    )  # fmt: skip
    return ModernBertModel(config).cuda()


def batch_of(lengths) -> TokenBatch:
    tokens = torch.randint(5, 90, (sum(lengths),), device="cuda")
    return TokenBatch(
        tokens, torch.zeros_like(tokens), torch.tensor([0, *lengths]).cumsum(0).int().cuda(), max(lengths)
    )


def run(encoder, batch, pooling, half_precision=True):
    encoder.dropout_seed = 5
    with torch.autocast("cuda", torch.bfloat16, enabled=half_precision):
        states = encoder.pooled(batch, pooling) if pooling else encoder(batch)
    weights = torch.randn(states.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    grads = torch.autograd.grad((states.float() * weights).sum(), list(encoder.parameters()))
    return states.detach().float(), torch.cat([grad.flatten().float() for grad in grads])


PATHS = {
    "kernels": {},
    "checkpointed": {"checkpointing": True},
    "compiled": {"fused": False},
    "library": {"attention": "library"},
    "eager": {"fused": False, "compile": False},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("longest", [200, 1500])
@pytest.mark.parametrize("pooling", [None, "cls"])
def test_states_and_gradients_are_those_of_the_padded_float32_path(path, longest, pooling):
    torch.manual_seed(longest)
    batch = batch_of([longest, 1, 64, *torch.randint(2, longest, (9,)).tolist()])
    model = model_of().train()
    for layer in model.layers:
        layer.attn.attention_dropout = 0.0  # on attention weights; only the padded path has it
    exact = run(Encoder(model, tiny_tokenizer()).train(), batch, pooling, half_precision=False)
    got = run(Encoder(model, tiny_tokenizer(), Execution(graphs=False, **PATHS[path])).train(), batch, pooling)
    assert error(got[0], exact[0]) < 1.5e-2
    assert error(got[1], exact[1]) < 3e-2


def test_a_replayed_pass_has_the_bits_of_a_plain_one():
    torch.manual_seed(1)
    batch = batch_of(torch.randint(2, 300, (12,)).tolist())
    plain, replayed = (Encoder(model_of(), tiny_tokenizer(), Execution(graphs=True)).train() for _ in range(2))
    plain._ragged_forward.graphs = Graphs(sightings=10**9)
    for pooling in (None, "cls"):
        expected = run(plain, batch, pooling)
        for _ in range(4):
            got = run(replayed, batch, pooling)
        assert got[0].equal(expected[0]) and got[1].equal(expected[1])
    assert len(replayed._ragged_forward.graphs._captured) == 2 and replayed._ragged_forward.graphs.why_off == ""


def test_checkpointing_repeats_the_masks_and_takes_less_memory():
    batch = batch_of([120] * 400)
    results, peaks = [], []
    for checkpointing in (False, True):
        encoder = Encoder(model_of(), tiny_tokenizer(), Execution(graphs=False, checkpointing=checkpointing)).train()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(run(encoder, batch, "cls"))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert results[0][0].equal(results[1][0])
    assert error(results[0][1], results[1][1]) < 1e-5  # torch's gradient of the word table differs between runs
    assert peaks[1] < 0.5 * peaks[0]


def test_rows_of_8192_tokens():
    model = model_of(num_hidden_layers=3).eval()
    batch = batch_of([8192, 100])
    with torch.no_grad():
        exact = Encoder(model, tiny_tokenizer())(batch)
        with torch.autocast("cuda", torch.bfloat16):
            got = Encoder(model, tiny_tokenizer())(batch)
    assert error(got, exact) < 1.5e-2
