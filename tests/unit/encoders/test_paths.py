"""Which path a batch takes, and the unpadded forward pass on the CPU with plain kernels (Triton: test_gpu.py)."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm
from transformers import BertConfig, BertModel

from ranker.encoders import paths, ragged_forward
from ranker.encoders.attention import PackedRows, PaddedRows, library_attention, padded_attention, padded_average
from ranker.encoders.compiled_layer import compiled_dropout, compiled_layer
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.kernel_functions import Kernels, triton_kernels
from ranker.encoders.kernel_layer import kernel_layer
from ranker.encoders.layer import linear_attention, post_norm_layer
from ranker.encoders.model_runner import TokenCounts
from ranker.encoders.post_norm_stack import PostNormStack
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.types import TokenBatch

CUDA = torch.device("cuda")


def layout_of(rows: PackedRows) -> RaggedLayout:
    tokens = torch.zeros(int(rows[0][-1]), dtype=torch.long)
    return RaggedLayout.of(TokenBatch(tokens, tokens, rows[0], int(rows[0].diff().max())))


def plain_kernels() -> Kernels:
    """Forward kernels in plain torch; the backward kernels are in test_kernel_layer.py."""

    def attend(qkv, *rows):
        return padded_attention(qkv, PaddedRows(layout_of(rows))), torch.zeros(1)

    def residual_norm(x, bias, states, hashes, rate, gain, shift, epsilon):
        dropped = x + bias if hashes is None else hashed_dropout(x + bias, hashes.clone(), rate)
        return layer_norm(dropped + states, gain.shape, gain, shift, epsilon)

    def average(states, queries, rows):
        queries = torch.cat([queries, queries.new_zeros(len(rows.cu_seqlens) - 1 - len(queries), *queries.shape[1:])])
        return padded_average(states, queries, PaddedRows(layout_of(rows)))

    return Kernels(attend, None, lambda x, bias: gelu(x + bias), None, residual_norm, None, average)


@pytest.fixture
def fast_device(monkeypatch):
    """The CPU counts as a device on which every path is available."""
    for name in ("unpadded_unavailable", "triton_unavailable", "short_unavailable", "compile_unavailable"):
        monkeypatch.setattr(paths, name, lambda *arguments: "")
    monkeypatch.setattr(ragged_forward, "short_unavailable", lambda *arguments: "")


@pytest.mark.usefixtures("fast_device")
def choose(model, *arguments):
    return paths.choose_path(model, PostNormStack().activation_of(model.encoder.layer[0]), *arguments)


@pytest.mark.parametrize(
    ("options", "run_layer", "dropout", "min_length"),
    [
        ({}, kernel_layer, hashed_dropout, 512),
        ({"fused": False}, compiled_layer, compiled_dropout, 512),
        ({"fused": False, "compile": False}, post_norm_layer, hashed_dropout, 512),
        ({"attention": "library"}, compiled_layer, compiled_dropout, 64),
        ({"attention": "library", "compile": False}, post_norm_layer, hashed_dropout, 64),
    ],
)
def test_options_choose_the_path(options, run_layer, dropout, min_length):
    model = BertModel(tiny_config(), add_pooling_layer=False)
    lines: list[str] = []
    path = choose(model, Execution(**options), 100, CUDA, lines.append)
    assert (path.run_layer, path.dropout, path.min_length, path.unpadded) == (run_layer, dropout, min_length, True)
    assert path.uses_kernels == (path.functions == triton_kernels()) == (run_layer is kernel_layer) and lines
    if min_length == 64:
        assert path.functions.attend is linear_attention(library_attention)
    padded = choose(model, Execution(**options), 100, None, lines.append)
    assert (padded.run_layer, padded.unpadded) == (post_norm_layer, False)


@pytest.mark.usefixtures("fast_device")
def test_an_activation_that_the_kernel_does_not_compute_is_compiled_or_refused():
    config = BertConfig(**{**tiny_config().to_dict(), "hidden_act": "relu"})
    model = BertModel(config, add_pooling_layer=False)
    assert choose(model, Execution(), 100, CUDA, lambda line: None).run_layer is compiled_layer
    with pytest.raises(
        ConfigError, match=r"encoder.fused: expected auto or false, got true, but the activation is ReLU"
    ):
        choose(model, Execution(fused=True), 100, CUDA, lambda line: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "short"}, "encoder.attention: expected auto or library, got 'short', but rows are long"),
        ({"fused": False, "compile": True}, "encoder.compile: expected auto or false, got true, but no compiler"),
    ],
)
def test_an_option_that_insists_on_an_unavailable_path_is_refused(options, message, fast_device, monkeypatch):
    monkeypatch.setattr(paths, "short_unavailable", lambda *arguments: "rows are long")
    monkeypatch.setattr(paths, "compile_unavailable", lambda *arguments: "no compiler")
    with pytest.raises(ConfigError, match=message):
        choose(BertModel(tiny_config()), Execution(**options), 600, CUDA, lambda line: None)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_unpadded_pass_has_the_states_of_the_padded_one(dropout, graphs, fast_device, monkeypatch):
    config = tiny_config()
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = dropout, 0.0
    model = BertModel(config, add_pooling_layer=False).double().train()
    unpadded, padded = (Encoder(model, tiny_tokenizer(), Execution(graphs=graphs)).train() for _ in range(2))
    unpadded._ragged_forward._ids_in_table = False  # no embedding kernel on the CPU
    unpadded.dropout_seed = padded.dropout_seed = 7
    lengths = (3, 9, 1)
    tokens, row_offsets = torch.randint(5, 90, (13,)), torch.tensor([0, *lengths]).cumsum(0).int()
    batch = TokenBatch(tokens, tokens % 2, row_offsets, max(lengths))
    with monkeypatch.context() as patch:
        patch.setattr(paths, "unpadded_unavailable", lambda *arguments: "padded here")
        expected = [padded(batch), padded.pooled(batch, "cls"), *padded.layers(batch)]
    monkeypatch.setattr(paths, "triton_kernels", plain_kernels)
    got = [unpadded(batch), unpadded.pooled(batch, "cls"), *unpadded.layers(batch)]
    for states, right in zip(got, expected, strict=True):
        torch.testing.assert_close(states, right, rtol=0, atol=1e-10)
    assert unpadded.token_counts == TokenCounts(3 * 64, 13 + 3 + 13) and padded.token_counts == TokenCounts(
        3 * 13, 13 + 3 + 13
    )
