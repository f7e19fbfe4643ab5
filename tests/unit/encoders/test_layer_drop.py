"""LayerDrop: a training step leaves out the layers that its seed says, on all of its micro-batches."""

import pytest
import torch
from transformers import BertModel, ModernBertConfig, ModernBertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.stack import layers_to_skip
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.types import TokenBatch


def model_of(kind):
    torch.manual_seed(0)
    if kind == "bert":
        config = tiny_config(dim=16)
        config.num_hidden_layers, config.hidden_dropout_prob, config.attention_probs_dropout_prob = 4, 0.0, 0.0
        return BertModel(config, add_pooling_layer=False)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    vocabulary = len(tiny_tokenizer())
    return ModernBertModel(
        ModernBertConfig(vocab_size=vocabulary, pad_token_id=0, global_attn_every_n_layers=1, **sizes)
    )


def batch():
    tokens = torch.tensor([2, 9, 3, 11, 3, 2, 17, 3])
    return TokenBatch(tokens, torch.zeros_like(tokens), torch.tensor([0, 5, 8], dtype=torch.int32), 5)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_step_is_that_of_a_model_without_the_layers(kind):
    model = model_of(kind)
    encoder = Encoder(model, tiny_tokenizer()).double().train()
    encoder.drop_layers(0.5)
    seed = next(seed for seed in range(100) if layers_to_skip(0.5, 4, seed) == {1, 2})
    encoder.dropout_seed = seed
    states = encoder(batch())
    pooled = encoder.pooled(batch(), "cls")
    ((states * torch.linspace(0, 1, 16)).sum() + pooled.square()[:, :3].sum()).backward()
    layers = model.encoder.layer if kind == "bert" else model.layers
    for number, layer in enumerate(layers):
        largest = max(float(weight.grad.abs().max()) for weight in layer.parameters())  # none lacks a gradient
        assert (largest == 0) == (number in (1, 2))
    small = model_of(kind)
    kept = torch.nn.ModuleList((small.encoder.layer if kind == "bert" else small.layers)[number] for number in (0, 3))
    setattr(small.encoder if kind == "bert" else small, "layer" if kind == "bert" else "layers", kept)
    small.config.num_hidden_layers = 2
    if kind == "modernbert":
        small.config.layer_types = small.config.layer_types[:2]
    expected = Encoder(small, tiny_tokenizer(), Execution(ragged=False)).double().train()(batch())
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(pooled, expected[[0, 5]], rtol=0, atol=1e-10)
    encoder.eval()
    assert (encoder(batch()) - states).abs().max() > 1e-3  # evaluation has all layers


def test_layers_are_left_out_at_the_rate_and_never_the_last():
    drawn = [layers_to_skip(0.3, 5, seed) for seed in range(2000)]
    assert max(map(max, filter(None, drawn))) == 3
    for number in range(4):
        assert abs(sum(number in skipped for skipped in drawn) / 2000 - 0.3) < 0.05
    assert layers_to_skip(0.0, 5, 1) == frozenset()


def test_where_it_can_not_be_done():
    encoder = Encoder(model_of("bert"), tiny_tokenizer(), Execution(ragged=False))
    with pytest.raises(ConfigError, match=r"encoder\.layer_drop: expected 0 where transformers runs the layers"):
        encoder.drop_layers(0.1)
    with pytest.raises(ConfigError, match=r"encoder\.layer_drop: expected at least 0 and below 1, got 1\.0"):
        encoder.drop_layers(1.0)
