"""The CUDA paths against float64 and against the padded float32 path.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/unit/encoders
"""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm
from transformers import BertConfig, BertModel

from ranker.encoders.attention import PackedRows, library_attention, short_attention
from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.embeddings import EmbeddingInputs, fused_embedding
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.graphs import Graphs
from ranker.encoders.kernel_functions import triton_kernels
from ranker.encoders.layer import kernel_average
from ranker.encoders.model_runner import TokenCounts
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.tiny import tiny_tokenizer
from ranker.interactions.pooling import pool
from ranker.types import TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def blocks_of(ends: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros(int(ends[-1]), dtype=torch.long, device="cuda")
    return RaggedLayout.of(TokenBatch(nothing, nothing, ends, int(ends.diff().max()))).blocks


def reference(qkv, lengths, attended):
    query, key, value = (part.split(lengths) for part in qkv.unbind(1))
    rows = []
    for row, count in enumerate(attended):
        logits = torch.einsum("ihd,jhd->hij", query[row], key[row][:count]) * qkv.shape[-1] ** -0.5
        rows.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), value[row][:count]))
    return torch.cat(rows)


@pytest.mark.parametrize(("dim", "longest"), [(32, 128), (64, 512), (64, 64), (128, 512)])
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("attend", [short_attention, library_attention])
def test_pc41_attention_and_its_gradients_equal_float64(dim, longest, partly, attend):
    torch.manual_seed(dim + longest)
    lengths = [1, 63, 64, longest, *torch.randint(1, longest + 1, (12,)).tolist(), 0]  # a padding row may be empty
    attended = [int(torch.randint(1, length + 1, ())) if partly and length else length for length in lengths]
    ends, cu_keys = (torch.tensor([0, *counts]).cumsum(0).int().cuda() for counts in (lengths, attended))
    keys = (
        torch.cat(
            [torch.arange(count) + start for count, start in zip(attended, ends[:-1].tolist(), strict=True)]
        ).cuda()
        if partly
        else None
    )
    qkv = torch.randn(sum(lengths), 3, 4, dim, device="cuda").bfloat16().requires_grad_()
    above = torch.randn(sum(lengths), 4, dim, device="cuda").bfloat16()
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN
    got = attend(qkv, PackedRows(ends, cu_keys, keys, longest, blocks_of(ends)))
    exact = qkv.detach().double().requires_grad_()
    expected = reference(exact, lengths, attended)
    assert error(got, expected) < 1e-2
    gradient, exact_gradient = (
        torch.autograd.grad(got, qkv, above)[0],
        torch.autograd.grad(expected, exact, above.double())[0],
    )
    for part in range(3):
        assert error(gradient[:, part], exact_gradient[:, part]) < 1e-2


@pytest.mark.parametrize("dim", [32, 128])
def test_attentions_bias_has_the_gradient_of_what_was_added(dim):
    lengths = [5, 64, 65, 200, 300, 512, 1, 0]  # through each of the backward kernels
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    qkv, above = half(sum(lengths), 3, 2, dim), half(sum(lengths), 2, dim)
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN
    kernels, rows = triton_kernels(), (ends, ends, blocks_of(ends))
    gradient, summed = kernels.attend_backward(above, qkv, *kernels.attend(qkv, *rows), *rows)
    assert error(summed, gradient.double().sum(0).flatten()) < 1e-2


@pytest.mark.parametrize(("heads", "dim", "longest"), [(2, 32, 64), (12, 768, 512), (16, 1024, 130), (20, 640, 300)])
@pytest.mark.parametrize("partly", [False, True])
def test_attention_of_first_tokens_and_its_gradients_equal_float64(heads, dim, longest, partly):
    torch.manual_seed(dim)
    lengths = [
        1,
        63,
        64,
        longest,
        *torch.randint(1, longest + 1, (12,)).tolist(),
        5,
    ]  # the last row is padding: it attends to nothing
    attended = [int(torch.randint(1, length + 1, ())) if partly else length for length in lengths]
    ends, cu_keys = (torch.tensor([0, *counts]).cumsum(0).int().cuda() for counts in (lengths, attended))
    states, queries = half(sum(lengths), dim), half(len(lengths) - 1, heads, dim)
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN
    got = kernel_average(states, queries, PackedRows(ends, cu_keys, None, longest, blocks_of(ends)))
    exact, exact_queries = (leaf.detach().double().requires_grad_() for leaf in (states, queries))
    rows = [row[:count] for row, count in zip(exact.split(lengths), attended, strict=True)]
    expected = torch.stack(
        [
            ((query @ row.T) * (dim // heads) ** -0.5).softmax(-1) @ row
            for row, query in zip(rows, exact_queries, strict=False)
        ]
    )
    above = torch.randn_like(got)
    assert error(got, expected) < 1e-2
    for own, right in zip(
        torch.autograd.grad(got, (states, queries), above),
        torch.autograd.grad(expected, (exact, exact_queries), above.double()),
        strict=True,
    ):
        assert error(own, right) < 1e-2


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


def full(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def held_to_float64(function, gradients, reference, *inputs: torch.Tensor) -> None:
    """Results and gradients agree within bf16's precision; weight gradients, which are float32, more closely."""
    exact = [own.detach().double().requires_grad_() for own in inputs]
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN
    with torch.no_grad():
        got = function(*inputs)
    expected, above = reference(*exact), torch.randn_like(got)
    assert error(got, expected) < 3e-3
    rights = torch.autograd.grad(expected, exact, above.double())
    with torch.no_grad():
        grads = gradients(above, *inputs)
    for own, right in zip(grads, rights, strict=True):
        assert own.shape == right.shape
        assert error(own, right) < (5e-3 if own.dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 32), (1003, 768), (5003, 384), (130, 1024), (65, 2048)])
def test_the_kernel_of_residual_sums_and_norms_equals_float64(rate, tokens, dim):
    torch.manual_seed(dim)
    numbers, kernels = torch.arange(tokens, device="cuda"), triton_kernels()
    hashes = dropout_hashes(7, numbers // 9, numbers % 9, 2)[1] if rate else None

    def exact(x, states, bias, gain, shift):
        joined = x + bias
        return layer_norm(
            (joined if hashes is None else hashed_dropout(joined, hashes.clone(), rate)) + states,
            (dim,),
            gain,
            shift,
            1e-12,
        )

    def gradients(above, x, states, bias, gain, shift):
        sums, by_states, by_x = kernels.residual_norm_backward(above, x, bias, states, hashes, rate, gain, 1e-12)
        return by_x, by_states, *sums

    held_to_float64(
        lambda x, states, bias, gain, shift: kernels.residual_norm(x, bias, states, hashes, rate, gain, shift, 1e-12),
        gradients,
        exact,
        half(tokens, dim),
        half(tokens, dim),
        full(dim),
        full(dim),
        full(dim),
    )


@pytest.mark.parametrize(("tokens", "dim"), [(1, 32), (1003, 768), (5003, 1536)])
def test_the_kernel_of_bias_and_gelu_equals_float64(tokens, dim):
    torch.manual_seed(dim)
    kernels = triton_kernels()
    held_to_float64(
        kernels.bias_gelu, kernels.bias_gelu_backward, lambda x, bias: gelu(x + bias), half(tokens, dim), full(dim)
    )


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rows", "dim", "types", "first_position"), [(1, 32, 2, 0), (90, 768, 2, 0), (300, 128, 1, 2), (40, 1024, 3, 0)]
)
def test_the_kernel_of_embeddings_and_the_tables_gradients_equal_float64(rate, rows, dim, types, first_position):
    torch.manual_seed(dim)
    config = BertConfig(
        hidden_size=dim, num_hidden_layers=1, num_attention_heads=1, vocab_size=200, type_vocab_size=types
    )
    embeddings = BertModel(config, add_pooling_layer=False).cuda().embeddings
    for weight in embeddings.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.randint(0, 200, (20 * rows,), device="cuda")
    batch = TokenBatch(tokens, tokens % types, torch.arange(0, 20 * rows + 1, 20, device="cuda").int(), 20)
    layout = RaggedLayout.of(batch)
    hashes = dropout_hashes(7, layout.row_indices, layout.position_ids, 1)[0] if rate else None
    exact = BertModel(config, add_pooling_layer=False).cuda().double().embeddings
    exact.load_state_dict(embeddings.state_dict())
    position_ids = layout.position_ids + first_position
    summed = (
        exact.word_embeddings(tokens)
        + exact.position_embeddings(position_ids)
        + exact.token_type_embeddings(batch.segments)
    )
    expected = (
        exact.LayerNorm(summed) if hashes is None else hashed_dropout(exact.LayerNorm(summed), hashes.clone(), rate)
    )
    torch.empty(2**27, device="cuda").fill_(float("nan"))  # memory that a kernel forgets to write is NaN
    inputs = EmbeddingInputs(layout, batch.segments, first_position, hashes, rate, torch.bfloat16)
    got = fused_embedding(embeddings, inputs)
    assert error(got, expected) < 3e-3
    above = torch.randn_like(got)
    got.backward(above)
    expected.backward(above.double())
    for (name, own), right in zip(embeddings.named_parameters(), exact.parameters(), strict=True):
        assert error(own.grad, right.grad) < 1e-5, name


def build_encoder(dropout: float, **options) -> Encoder:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, num_hidden_layers=4, vocab_size=1500
    )
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer(), Execution(**options)).cuda()
    encoder.dropout_seed = 3
    return encoder


PATHS = {
    "kernels": {"attention": "short", "fused": True},
    "compiled": {"attention": "short", "fused": False, "compile": True},
    "eager": {"attention": "short", "fused": False, "compile": False},
    "library-compiled": {"attention": "library", "compile": True},
    "library-eager": {"attention": "library", "compile": False},
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("partly", "pooling"), [(False, "none"), (True, "none"), (False, "cls")])
def test_states_and_gradients_equal_the_padded_float32_path(dropout, path, partly, pooling):
    torch.manual_seed(1)
    for lengths in ([5, 80, 200, 33], [90] * 7, [300, 1], [100, 28]):  # new shapes go through the same code
        tokens = torch.randint(5, 1000, (sum(lengths),))
        batch = TokenBatch(tokens, tokens % 2, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
        if partly:
            batch.attended = torch.tensor([max(length // 2, 1) for length in lengths], dtype=torch.int32)
            batch.num_attended = int(batch.attended.sum())
        batch = batch.to("cuda")
        exact, fast = build_encoder(dropout), build_encoder(dropout, **PATHS[path])
        expected = exact(batch) if pooling == "none" else pool(exact(batch), batch, pooling)
        with torch.autocast("cuda", torch.bfloat16):
            got = fast(batch) if pooling == "none" else fast.pooled(batch, pooling)
        assert got.dtype == torch.float32
        assert error(got, expected) < 1e-2
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (got * weights).sum().backward()
        assert [p.grad is None for p in exact.parameters()] == [p.grad is None for p in fast.parameters()]
        norms = [
            torch.stack([p.grad.double().norm() for p in encoder.parameters() if p.grad is not None]).norm()
            for encoder in (exact, fast)
        ]
        assert abs(norms[1] / norms[0] - 1) < 1e-3


@pytest.mark.parametrize("path", ["kernels", "compiled"])
@pytest.mark.parametrize("pooling", ["none", "cls", "mean"])
def test_a_large_pass_has_the_same_bits_each_time(path, pooling):
    torch.manual_seed(5)
    encoder, batch = (
        build_encoder(0.1, **PATHS[path], graphs=False),
        random_batch(*torch.randint(20, 160, (300,)).tolist()),
    )
    seen = []
    for _ in range(3):
        encoder.zero_grad()
        states = read(encoder, batch, pooling)
        weighted_sum(states).backward()
        seen.append([states.detach(), *(own.grad.clone() for own in encoder.parameters())])
    for again in seen[1:]:
        assert all(own.equal(first) for own, first in zip(again, seen[0], strict=True))


def random_batch(*lengths: int) -> TokenBatch:
    tokens = torch.randint(5, 1000, (sum(lengths),))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return TokenBatch(tokens, tokens % 2, ends, max(lengths), row_ids=torch.randperm(len(lengths))).to("cuda")


def weighted_sum(states: torch.Tensor) -> torch.Tensor:
    """A loss with another gradient for each value."""
    return (states * torch.linspace(-1, 1, states.numel(), device="cuda").view_as(states)).sum()


def read(encoder: Encoder, batch: TokenBatch, pooling: str) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return encoder(batch) if pooling == "none" else encoder.pooled(batch, pooling)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("path", ["kernels", "compiled"])
@pytest.mark.parametrize("pooling", ["none", "cls"])
def test_replayed_passes_are_the_plain_ones_bit_by_bit(dropout, path, pooling):
    torch.manual_seed(2)
    plain, replayed = (build_encoder(dropout, **PATHS[path], graphs=True) for _ in range(2))
    plain._ragged_forward.graphs = Graphs(sightings=10**9)
    optimizers = [torch.optim.AdamW(encoder.parameters(), lr=1e-3, fused=True) for encoder in (plain, replayed)]
    batches = [random_batch(*(80 + i % 7 for i in range(count))) for count in (10, 10, 13, 10, 13, 10, 13, 13)]
    for step in range(4):  # of two micro-batches; each size comes up four times
        for encoder in (plain, replayed):
            encoder.dropout_seed = 2**63 + step
            for batch in batches[2 * step : 2 * step + 2]:
                states = read(encoder, batch, pooling)
                weighted_sum(states).backward()
            encoder.states = states.detach()
        assert replayed.states.equal(plain.states)
        for own, expected in zip(replayed.parameters(), plain.parameters(), strict=True):
            assert own.grad.equal(expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(replayed._ragged_forward.graphs._captured) == 2 and replayed._ragged_forward.graphs.why_off == ""


def test_two_passes_that_wait_for_one_backward_pass_do_not_share_activations():
    torch.manual_seed(3)
    plain, replayed = build_encoder(0.1, graphs=True), build_encoder(0.1, graphs=True)
    plain._ragged_forward.graphs = Graphs(sightings=10**9)
    for turn in range(5):
        queries, docs = random_batch(*[9] * 8), random_batch(*[70] * 16)
        for encoder in (plain, replayed):
            read(encoder, queries, "cls")  # whose result is not used
            read(encoder, docs, "cls").sum().backward()
            encoder.zero_grad()
            scores = read(encoder, queries, "cls") @ read(encoder, docs, "cls").T
            scores.sin().sum().backward()
            encoder.states = scores.detach()
        assert replayed.states.equal(plain.states), turn
        for own, expected in zip(replayed.parameters(), plain.parameters(), strict=True):
            assert own.grad.equal(expected.grad)
            own.grad = expected.grad = None
    lanes = {key[0] for key in replayed._ragged_forward.graphs._captured}
    assert lanes == {0, 1}, "the second of two passes has memory of its own"


def test_small_passes_are_replayed_and_others_not():
    encoder = build_encoder(0.1)
    small, large = random_batch(*[60] * 20), random_batch(*[500] * 200)
    for batch, computed in ((small, 1216), (large, 100_032)) * 4:
        encoder.token_counts = TokenCounts()
        read(encoder, batch, "cls").sum().backward()
        assert encoder.token_counts == TokenCounts(computed, batch.num_rows)
    encoder.eval()
    read(encoder, small, "cls").sum().backward()
    with torch.no_grad():
        read(encoder.train(), small, "cls")
    assert [key[1] for key in encoder._ragged_forward.graphs._captured] == [1216]  # 1,200 tokens, in steps of 64


def dropped(rate: float):
    return lambda encoder: [
        setattr(module, "p", rate) for module in encoder.modules() if isinstance(module, torch.nn.Dropout)
    ]


def test_replayed_passes_follow_what_changes():
    torch.manual_seed(4)
    plain, replayed = build_encoder(0.1, graphs=True), build_encoder(0.1, graphs=True)
    plain._ragged_forward.graphs = Graphs(sightings=10**9)
    batch = random_batch(*[70] * 12)
    changes = (
        lambda encoder: None,
        lambda encoder: encoder.model.embeddings.requires_grad_(False),
        lambda encoder: encoder.cpu().cuda(),
        dropped(0.3),
        dropped(0.0),
    )
    for number, change in enumerate(changes):
        for encoder in (plain, replayed):
            change(encoder)
        for pooling in ("cls", "none") * 4:
            for encoder in (plain, replayed):
                encoder.states = read(encoder, batch, pooling)
                weighted_sum(encoder.states).backward()
            assert replayed.states.equal(plain.states), (number, pooling)
            for own, expected in zip(replayed.parameters(), plain.parameters(), strict=True):
                assert (own.grad is None) == (expected.grad is None)
                assert own.grad is None or own.grad.equal(expected.grad), (number, pooling)
                own.grad = expected.grad = None
        assert replayed._ragged_forward.graphs._captured and not replayed._ragged_forward.graphs.why_off


def test_graphs_share_the_memory_of_the_largest():
    encoder, taken = build_encoder(0.1, graphs=True), []
    for rows in (300, 250, 200):
        for _ in range(4):
            read(encoder, random_batch(*[80] * rows), "cls").sum().backward()
        encoder.zero_grad()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    assert len(encoder._ragged_forward.graphs._captured) == 3
    assert taken[2] - taken[0] < 0.1 * taken[0]


@pytest.mark.parametrize("pooling", ["none", "cls"])
def test_replayed_passes_meet_longer_rows_than_the_first(pooling):
    torch.manual_seed(6)
    plain, replayed = build_encoder(0.1, graphs=True), build_encoder(0.1, graphs=True)
    plain._ragged_forward.graphs = Graphs(sightings=10**9)
    for lengths in (
        [70] * 12,
        [70] * 12,
        [70] * 12,
        [60] * 11 + [180],
        [30] * 11 + [510],
        [70] * 12,
    ):  # all of 840 tokens
        batch = random_batch(*lengths)
        for encoder in (plain, replayed):
            encoder.zero_grad()
            encoder.states = read(encoder, batch, pooling)
            weighted_sum(encoder.states).backward()
        assert replayed.states.equal(plain.states)
        assert all(
            own.grad.equal(expected.grad)
            for own, expected in zip(replayed.parameters(), plain.parameters(), strict=True)
        )
    assert len(replayed._ragged_forward.graphs._captured) == 1
