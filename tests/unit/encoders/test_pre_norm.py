"""ModernBERT's layers of this package against transformers' own forward of each row alone, in float64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ModernBertConfig, ModernBertModel

from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

SMALL = {
    "vocab_size": 120, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "local_attention": 6, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2,
    "eos_token_id": 3, "sep_token_id": 3,
}  # fmt: skip
LENGTHS = (5, 31, 1, 4, 22, 30)  # some longer than a window of 3 on each side
THETAS = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 20.0}}
CONFIGS = {
    "plain": {},
    "older keys": {"global_rope_theta": 700.0, "local_rope_theta": 30.0, "global_attn_every_n_layers": 2},
    "two angles": {"rope_parameters": {kind: {"rope_type": "default", **THETAS[kind]} for kind in THETAS}},
    "biases": {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "relu"},
    "last layer with a window": {"num_hidden_layers": 3},
}


def model_of(**options):
    torch.manual_seed(0)
    model = ModernBertModel(ModernBertConfig(**{**SMALL, **options})).double().eval()
    for weight in model.parameters():  # norms and biases that do something
        torch.nn.init.normal_(weight, std=0.3)
    return model


def batch_of(lengths=LENGTHS, seed=1) -> TokenBatch:
    tokens = torch.randint(5, 90, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(tokens, tokens % 2, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))


def alone(model, batch) -> list[torch.Tensor]:
    """The embeddings and each layer's states, of each row by itself."""
    rows = [
        model(row.unsqueeze(0), output_hidden_states=True).hidden_states
        for row in batch.tokens.split(batch.cu_seqlens.diff().tolist())
    ]
    return [torch.cat([states[0] for states in layer]) for layer in zip(*rows, strict=True)]


def close(got, expected, bound=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_states_and_gradients_are_those_of_each_row_alone(options):
    model, batch = model_of(**options), batch_of()
    encoder = Encoder(model, tiny_tokenizer())
    assert encoder.path == "modernbert" and encoder.num_layers == len(model.layers)
    expected = alone(model, batch)
    firsts = batch.cu_seqlens[:-1].long()
    close(encoder(batch), expected[-1])
    close(encoder.pooled(batch, "cls"), expected[-1][firsts])
    for layer, right in zip(encoder.layers(batch), expected, strict=True):
        close(layer, right)
    above = torch.randn_like(expected[-1])
    for got, right, weight in (
        (encoder(batch), expected[-1], above),
        (encoder.pooled(batch, "cls"), expected[-1][firsts], above[firsts]),
    ):
        wanted = torch.autograd.grad((right * weight).sum(), list(model.parameters()), retain_graph=True)
        for own, gradient in zip(
            torch.autograd.grad((got * weight).sum(), list(model.parameters())), wanted, strict=True
        ):
            close(own, gradient, 1e-9 * max(1.0, float(gradient.abs().max())))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_dropout_has_its_sites_in_the_order_of_the_modules(checkpointing, attention_dropout):
    model = model_of(embedding_dropout=0.1, mlp_dropout=0.3, attention_dropout=attention_dropout).train()
    for layer in model.layers:
        layer.attn.attention_dropout = 0.0  # on attention weights: drawn at random, not compared here
    batch = batch_of()
    encoder = Encoder(model, tiny_tokenizer(), Execution(checkpointing=checkpointing)).train()
    encoder.dropout_seed = 11
    got = encoder(batch)
    rates = [0.1, *[rate for _ in model.layers for rate in ([attention_dropout] if attention_dropout else []) + [0.3]]]
    grads = torch.autograd.grad(got.square().sum(), list(model.parameters()))

    class Site(torch.nn.Module):
        """Hashed dropout in the place of a module of transformers' model, numbered by the order of the calls."""

        def forward(self, states):
            number, rate = next(calls)
            keys = dropout_hashes(11, torch.full((states.shape[1],), row), torch.arange(states.shape[1]), len(rates))
            return hashed_dropout(states[0], keys[number], rate).unsqueeze(0)

    model.embeddings.drop = Site()
    for layer in model.layers:
        layer.mlp.drop = Site()
        if attention_dropout:
            layer.attn.out_drop = Site()
    states = []
    for row, tokens in enumerate(batch.tokens.split(list(LENGTHS))):  # noqa: B007 - read by Site
        calls = iter(enumerate(rates))
        states.append(model(tokens.unsqueeze(0)).last_hidden_state[0])
        assert next(calls, None) is None
    expected = torch.cat(states)
    close(got, expected)
    assert not got.allclose(encoder.eval()(batch), atol=1e-2)
    for own, right in zip(grads, torch.autograd.grad(expected.square().sum(), list(model.parameters())), strict=True):
        close(own, right, 1e-9 * max(1.0, float(right.abs().max())))


def test_rows_as_long_as_the_positions_allow_and_their_padding():
    model = model_of()
    batch = batch_of((64, 3))
    encoder = Encoder(model, tiny_tokenizer())
    assert encoder.max_tokens == 64
    with torch.no_grad():
        close(encoder(batch), alone(model, batch)[-1])


def test_a_token_past_the_attended_ones_reads_those_in_its_window():
    """Rows of which the first tokens alone are attended to; a token without any in its window gets no attention."""
    model = model_of(num_hidden_layers=2)
    whole = batch_of((9, 2))
    batch = TokenBatch(whole.tokens, whole.segments, whole.cu_seqlens, 9, torch.tensor([2, 2]), 4)
    with torch.no_grad():
        got, embedded = Encoder(model, tiny_tokenizer())(batch), model.embeddings(batch.tokens[:9].unsqueeze(0))
        positions = torch.arange(9)
        states = embedded
        for layer in model.layers:
            mask = (positions < 2).expand(9, 9)
            if layer.attention_type == "sliding_attention":
                mask = mask & ((positions[:, None] - positions).abs() <= 3)
            turns = model.rotary_emb(states, positions.unsqueeze(0), layer.attention_type)
            some = mask.any(1)
            rows, inner = torch.zeros_like(states), layer.attn_norm(states)
            attended = layer.attn(inner, turns, (mask | ~some[:, None])[None, None])[0]
            rows[:, some] = attended[:, some]  # without biases, no attention is 0
            states = states + rows
            states = states + layer.mlp(layer.mlp_norm(states))
    assert int(some.sum()) == 5
    close(got[:9], model.final_norm(states)[0])


def test_the_last_layer_computes_first_tokens_alone():
    model, batch = model_of(), batch_of()
    encoder = Encoder(model, tiny_tokenizer())

    def flops(compute):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            compute()
        return counter.get_total_flops()

    saved = flops(lambda: encoder(batch)) - flops(lambda: encoder.pooled(batch, "cls"))
    others = sum(LENGTHS) - len(LENGTHS)
    assert saved == 2 * others * (16 * 16 + 3 * 16 * 24)  # output projection and feed-forward block
