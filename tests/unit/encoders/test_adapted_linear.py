"""Stacked layers with adapters against peft's own forward."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModel, Qwen3Config

from ranker.encoders.adapted_linear import group_siblings
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.lora import LoRA, add_adapter, merge_adapter
from ranker.encoders.lora_layers import adapted_layers, refresh_stacked, use_own_forward
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch


class Block(nn.Module):
    """Three layers that read the same states, one with fewer outputs than inputs, and one that reads others."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 40, bias), nn.Linear(24, 16, bias), nn.Linear(24, 16, bias)
        self.o, self.up = nn.Linear(40, 24, bias), nn.Linear(24, 32, bias)

    def forward(self, states):
        mixed = self.q(states).sin() * torch.cat([self.k(states), self.v(states), self.v(states)[..., :8]], -1)
        states = states + self.o(mixed)
        return self.up(states)


def adapted(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q", "k", "v", "o", "up"], rank_pattern={"k": 3}, alpha_pattern={"v": 5},
    )  # fmt: skip
    model = peft.inject_adapter_in_model(config, Block(bias)).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


def run(model, call, states):
    states = states.clone().requires_grad_()
    model.zero_grad()
    result = call(states)
    (result * torch.arange(result.numel(), dtype=result.dtype).view_as(result).sin()).sum().backward()
    return result.detach(), [states.grad, *(weight.grad for weight in model.parameters() if weight.requires_grad)]


@pytest.mark.parametrize("bias", [False, True])
def test_states_and_gradients_are_pefts(bias):
    theirs, states = adapted(bias), torch.randn(2, 7, 24, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    use_own_forward(ours)
    group_siblings(adapted_layers(ours), lambda: ours(states))
    places = {name: (layer.place, len(layer.siblings.layers)) for name, layer in ours.named_children()}
    assert places == {"q": (0, 3), "k": (1, 3), "v": (2, 3), "o": (0, 1), "up": (0, 1)}

    class Running:
        stacked = True

    for layer in adapted_layers(ours):
        layer.packing = type("Packing", (), {"current": Running()})()
    for _ in range(2):  # the second time with other adapters
        assert refresh_stacked(ours, torch.float64)
        assert ours.q.base_layer.weight.data_ptr() == ours.q.siblings.wide.data_ptr(), (
            "the frozen weights are not twice"
        )
        expected, mine = run(theirs, theirs, states), run(ours, ours, states)
        torch.testing.assert_close(mine[0], expected[0], rtol=0, atol=1e-12)
        for one, other in zip(mine[1], expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        with torch.no_grad():
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                if one.requires_grad:
                    other += 0.1
                    one += 0.1
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    twin = copy.deepcopy(ours)
    assert twin.q.siblings.wide is None and twin.q.siblings.layers[1] is twin.k
    ours.peft_config = {}
    merge_adapter(ours)
    assert ours.q.weight.is_contiguous() and type(ours.q) is nn.Linear
    torch.testing.assert_close(ours(states), theirs(states), rtol=0, atol=1e-12)


def test_training_follows_a_pass_in_inference_mode():
    theirs, states = adapted(True), torch.randn(3, 24, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    use_own_forward(ours)
    group_siblings(adapted_layers(ours), lambda: ours(states))
    for layer in adapted_layers(ours):
        layer.packing = type("Packing", (), {"current": type("Running", (), {"stacked": True})()})()
    with torch.inference_mode():
        assert refresh_stacked(ours, torch.float64)
        ours(states)
    assert refresh_stacked(ours, torch.float64)
    got, expected = run(ours, ours, states), run(theirs, theirs, states)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_what_can_not_be_stacked_is_not(tmp_path):
    model, states = adapted(False), torch.randn(3, 24, dtype=torch.float64)
    use_own_forward(model)
    assert not refresh_stacked(model, torch.float64), "their groups are not known"
    group_siblings(adapted_layers(model), lambda: model(states))
    assert refresh_stacked(model, torch.float64)
    model.q.lora_dropout["default"] = nn.Dropout(0.5)
    assert not refresh_stacked(model, torch.float64)
    assert refresh_stacked(model.eval(), torch.float64), "in evaluation nothing is dropped"
    model.o._disable_adapters = True
    assert not refresh_stacked(model, torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_on_a_gpu_is_near_float64(compile, base, checkpointing):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tiny_tokenizer()), hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=256, pad_token_id=0,
    )  # fmt: skip
    model = AutoModel.from_config(config)
    add_adapter(model, LoRA(rank=4))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.05)
        elif "lora_" not in name:
            weight.data = weight.data.bfloat16().to(base)
    model = model.cuda()
    exact = copy.deepcopy(model).double()
    encoder = Encoder(model, tiny_tokenizer(), Execution(compile=compile, checkpointing=checkpointing)).train()
    for lengths in ((40, 7, 1, 64, 23), (5, 190), (33,), (87,) * 9):
        tokens = torch.randint(5, 400, (sum(lengths),), generator=torch.Generator().manual_seed(1))
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        batch = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(lengths)).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            states = encoder(batch)
        alone = torch.cat([exact(input_ids=row[None]).last_hidden_state[0] for row in batch.tokens.split(lengths)])
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)).cuda()
        model.zero_grad(), exact.zero_grad()
        (states.float() * weights).sum().backward()
        (alone * weights).sum().backward()
        assert (states - alone).norm() < 0.03 * alone.norm()
        for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                assert (ours.grad - theirs.grad).norm() < 0.1 * theirs.grad.norm(), name
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
                if ours.requires_grad:
                    step = 0.02 * torch.randn_like(ours)
                    ours += step
                    theirs += step
    assert model.layers[0].self_attn.q_proj.siblings.wide is not None
