"""Gated feed-forward layers that run stacked: transformers' own layer with peft's adapters, and the kernel."""

import copy
import os

import peft
import pytest
import torch
from torch import nn
from transformers import GemmaConfig, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ranker.encoders.adapted_linear import group_siblings
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.gated_mlp import gated_silu, use_gated_kernel
from ranker.encoders.lora_layers import adapted_layers, refresh_stacked, use_own_forward
from tests.assets.interpreter import run_interpreted

# activation, tokens, dim, rate of dropout
CASES = [("silu", 5, 40, 0.0), ("silu", 33, 256, 0.0), ("silu", 1, 1, 0.0), ("silu", 0, 8, 0.0)]
CASES += [("gelu", 5, 40, 0.0), ("gelu", 33, 130, 0.25)]
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


def plain(x: torch.Tensor) -> torch.Tensor:
    gates, values = x.chunk(2, 1)
    return gates / (1 + torch.exp(-gates)) * values


def test_the_operator_is_right_with_its_gradient():
    torch.manual_seed(0)
    x, above = torch.randn(7, 12, dtype=torch.float64, requires_grad=True), torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(gated_silu(x), plain(x), rtol=0, atol=1e-14)
    (mine,), (theirs,) = (torch.autograd.grad(call(x), x, above) for call in (gated_silu, plain))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


class Running:
    stacked = True


def adapted(kind, config):
    torch.manual_seed(0)
    layers = nn.ModuleDict({"mlp": kind(config)})
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["gate_proj", "up_proj", "down_proj"])
    model = peft.inject_adapter_in_model(options, layers).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


@pytest.mark.parametrize(
    ("kind", "config", "count"),
    [(Qwen3MLP, Qwen3Config, 1), (GemmaMLP, GemmaConfig, 0)],
    ids=["silu", "another activation"],
)
def test_a_layer_of_transformers_computes_the_same(kind, config, count, monkeypatch):
    theirs = adapted(kind, config(hidden_size=24, intermediate_size=40))
    ours, states = copy.deepcopy(theirs), torch.randn(2, 7, 24, dtype=torch.float64)
    use_own_forward(ours)
    group_siblings(adapted_layers(ours), lambda: ours["mlp"](states))
    packing = type("Packing", (), {"current": None})()
    for module in ours.modules():
        module.packing = packing
    assert use_gated_kernel(ours) == count
    assert use_gated_kernel(ours) == 0, "a layer is changed once"
    calls = []
    monkeypatch.setattr("ranker.encoders.gated_mlp.gated_silu", lambda x: calls.append(1) or gated_silu(x))
    for current, called in ((None, 0), (Running(), count)):
        packing.current = current
        refresh_stacked(ours, torch.float64)
        grads, results = [], []
        for model in (ours, theirs):
            model.zero_grad()
            x = states.clone().requires_grad_()
            results.append(model["mlp"](x))
            results[-1].square().sum().backward()
            grads.append([x.grad, *(weight.grad for weight in model.parameters() if weight.requires_grad)])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-11)
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        assert len(calls) == called


@pytest.mark.skipif(IN_INTERPRETER, reason="this process is the interpreter's")
def test_the_kernel_is_right_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")
    assert f"{len(CASES)} passed" in run_interpreted(__file__, "-k", "kernel_equals")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() and not IN_INTERPRETER, reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"
)
@pytest.mark.parametrize(("activation", "tokens", "dim", "rate"), CASES)
def test_the_kernel_equals_float64(activation, tokens, dim, rate):
    from ranker.encoders.kernels import gated_activation as kernels

    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if IN_INTERPRETER else ("cuda", torch.bfloat16)
    bound = 1e-5 if IN_INTERPRETER else 3e-2
    x = torch.randn(tokens, 2 * dim, device=device).to(dtype)
    above = torch.randn(tokens, dim + 3, device=device).to(dtype)[:, :dim]  # rows apart, as adapted_linear returns them
    hashes = torch.randint(-(2**31), 2**31, (tokens,), device=device).int() if rate else None
    exact = x.double().requires_grad_()
    first, second = exact.chunk(2, 1)
    expected = plain(exact) if activation == "silu" else first * torch.special.ndtr(first) * second
    expected = hashed_dropout(expected, hashes, rate) if rate else expected
    (gradient,) = torch.autograd.grad(expected, exact, above.double())
    found, found_gradient = (
        kernels.gated(x, activation, hashes, rate),
        kernels.gated_backward(above, x, activation, hashes, rate),
    )
    torch.testing.assert_close(found.double(), expected.detach(), rtol=bound, atol=bound)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=bound, atol=bound)
