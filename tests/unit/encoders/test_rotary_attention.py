"""Attention modules of transformers with this package's rotation of queries and keys, against their own code."""

import copy
import logging

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoConfig, AutoModel

from ranker.encoders import rotary_attention
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.lora import LoRA, add_adapter
from ranker.encoders.lora_layers import refresh_stacked
from ranker.encoders.packing import Packing, Pass
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.rotary_attention import use_rotary_kernel
from ranker.encoders.rotary_heads import rotary_heads
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# number of the two layers that can use the kernel
FAMILIES = {
    "qwen3": ({"head_dim": 12}, 2),
    "llama": ({}, 2),
    "mistral": ({"sliding_window": 4}, 2),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, 2),
    "eurobert": ({}, 2),
    "granite": ({"attention_multiplier": 0.3}, 2),  # another scale of the logits
    "gemma": ({"head_dim": 8}, 2),
    "gemma2": ({"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}, 2),  # soft-capped logits
    "smollm3": ({"no_rope_layers": [1, 0]}, 1),  # one layer without positions
    "gemma3_text": ({"head_dim": 8}, 0),  # the norm multiplies by 1 + gain
    "olmo2": ({}, 0),  # norms over all heads
    "cohere": ({}, 0),  # pairs of neighbours are rotated
    "glm": ({"head_dim": 8, "partial_rotary_factor": 0.5}, 0),  # the same, in a part of a head
    "stablelm": ({"partial_rotary_factor": 0.5}, 0),  # a part of a head
    "bert": ({}, 0),  # other layers
}


def model_of(family: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    options = {**SIZES, **FAMILIES[family][0], **options, "vocab_size": len(tiny_tokenizer())}
    config = AutoConfig.for_model(family, **options)
    model = AutoModel.from_config(config)
    for weight in model.parameters():  # gains that are not all 1
        if weight.dim() == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


def rows_of(*lengths: int, device: str = "cpu") -> TokenBatch:
    tokens = torch.randint(5, 400, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return TokenBatch(tokens, torch.zeros_like(tokens), ends, max(lengths)).to(device)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_modules_that_compute_the_same_change(family, caplog):
    model, count = model_of(family), FAMILIES[family][1]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    Packing.of(model)
    modes = [module.training for module in model.modules()]
    with caplog.at_level(logging.INFO, "ranker.encoders.rotary_attention"):
        assert use_rotary_kernel(model) == count
    assert use_rotary_kernel(model) == 0, "a module is changed once"
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    kept = 0 if family == "bert" else 2 - count
    message = f"kernel rotates the queries and keys of {count} layers; {kept} layers run their own code"
    assert (message in caplog.text) == (family != "bert")


def test_modules_with_other_parameters_keep_their_own_code():
    model = model_of("qwen3", num_hidden_layers=3)
    Packing.of(model)
    first, second, third = (layer.self_attn for layer in model.layers)
    first.q_norm.bias = nn.Parameter(torch.zeros(12))  # without effect before training
    second.sinks = nn.Parameter(torch.zeros(6))
    third.k_norm.variance_epsilon = 0.5  # the kernel has one epsilon for both norms
    assert use_rotary_kernel(model) == 0


def kernels_everywhere(monkeypatch, model) -> list[int]:
    """Let passes on the CPU run what they run on a GPU; return a list that grows by each call of the operation."""
    running, calls = Packing.running, []

    def run(self, forward):
        forward.kernels, forward.stacked = True, hasattr(model, "peft_config") and refresh_stacked(model, torch.float64)
        return running(self, forward)

    monkeypatch.setattr(Packing, "running", run)
    monkeypatch.setattr(rotary_attention, "rotary_heads", lambda *given: calls.append(1) or rotary_heads(*given))
    return calls


@pytest.mark.parametrize("adapted", ["none", "qv", "all", "checkpointed"])
@pytest.mark.parametrize("family", [family for family, (_, count) in FAMILIES.items() if count])
def test_states_and_gradients_are_those_of_transformers(family, adapted, monkeypatch):
    model = model_of(family)
    if adapted in ("qv", "all"):
        add_adapter(model, LoRA(rank=4, targets="all-linear" if adapted == "all" else ["q_proj", "v_proj"]))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)
    model = model.double()
    batch, lengths = rows_of(9, 1, 14), (9, 1, 14)
    reference = copy.deepcopy(model)
    encoder = Encoder(model, tiny_tokenizer(), Execution(checkpointing=adapted == "checkpointed")).train()
    alone = torch.cat([reference(input_ids=row[None]).last_hidden_state[0] for row in batch.tokens.split(lengths)])
    calls = kernels_everywhere(monkeypatch, model)
    states = encoder(batch)
    first = len(calls)
    assert first == FAMILIES[family][1] * (1 if adapted == "all" else 2), "one product, or two"
    # norms and rotations of transformers are partly in float32
    torch.testing.assert_close(states, alone, rtol=0, atol=1e-5)
    above = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (states * above).sum().backward()
    (alone * above).sum().backward()
    assert (len(calls) > first) == (adapted == "checkpointed"), "the backward pass computes states again"
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-9, name


def test_a_layer_compiles_once_with_the_operation_as_one_node(monkeypatch):
    def elementwise(module, query, key, value, mask, **options):  # attention on a CPU is outside of compiled code
        mixed = query * key.repeat_interleave(3, 1) + value.repeat_interleave(3, 1).sin()
        return mixed.transpose(1, 2), None

    monkeypatch.setattr(rotary_attention, "packed_attention", elementwise)
    model, graphs = model_of("qwen3", num_hidden_layers=1), []
    add_adapter(model, LoRA(rank=4))
    model = model.double()
    Encoder(model, tiny_tokenizer())

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    def attend(states, cos, sin):
        attention = model.layers[0].self_attn  # its hooks are outside of compiled code
        return attention.forward(hidden_states=states, position_embeddings=(cos, sin), attention_mask=None)[0]

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for tokens in (5, 9, 14):
        states, above = torch.randn(2, 1, tokens, 48, dtype=torch.float64)
        angles = torch.randn(2, 1, tokens, 12, dtype=torch.float64)
        batch, results = rows_of(tokens), []
        forward = Pass(batch, RaggedLayout.of(batch), True, kernels=True, last_only=True)
        forward.stacked = refresh_stacked(model, torch.float64)
        for call in (attend, compiled):
            leaf = states.clone().requires_grad_()
            with Packing.of(model).running(forward):
                output = call(leaf, *angles)
            results.append([output.detach(), *torch.autograd.grad(output, leaf, above)])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
    forward, backward = graphs
    assert [name for name in forward if "rotate_heads" in name] == ["ranker.rotate_heads.default"]
    assert [name for name in backward if "rotate_heads" in name] == ["ranker.rotate_heads_backward.default"]
    assert not any("cat" in name or "scatter" in name for name in backward), "gradients are not joined"


def test_everywhere_else_the_modules_own_code_runs(monkeypatch):
    model = model_of("qwen3")
    encoder, batch = Encoder(model, tiny_tokenizer()).eval(), rows_of(9, 4)

    def never(*_: object) -> None:
        raise AssertionError("this package's rotation on a CPU")

    monkeypatch.setattr(rotary_attention, "rotary_heads", never)
    encoder(batch)
    model(input_ids=batch.tokens[None])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize("way", ["compiled", "adapted", "checkpointed"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "eurobert"])
def test_layers_on_a_gpu_are_near_float64_and_compile_once(family, way):
    model = model_of(family, hidden_size=384, head_dim=64)
    if way == "adapted":
        add_adapter(model, LoRA(rank=4))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.05)
    model = model.cuda()
    exact = copy.deepcopy(model).double()
    encoder = Encoder(
        model, tiny_tokenizer(), Execution(compile=way != "checkpointed", checkpointing=way == "checkpointed")
    ).train()
    kernel, own = [], []
    for use in (True, False):  # then the module's own code, whose error is the measure
        compiles = []
        for lengths in ((40, 7, 1, 64, 23), (5, 190), (33, 40), (87,) * 9):
            batch = rows_of(*lengths, device="cuda")
            alone = torch.cat([exact(input_ids=row[None]).last_hidden_state[0] for row in batch.tokens.split(lengths)])
            above = torch.randn(alone.shape, generator=torch.Generator().manual_seed(2)).cuda()
            model.zero_grad(), exact.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                states = encoder(batch)
            (states.float() * above).sum().backward()
            (alone * above).sum().backward()
            errors = [float((states - alone).norm() / alone.norm())]
            for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), name
                if theirs.grad is not None and theirs.grad.norm() > 1e-3:
                    errors.append(float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
            (kernel if use else own).append(torch.tensor(errors))
            compiles.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert compiles[1] == compiles[-1], "other numbers of tokens compile again"
        if use:
            for module in model.modules():
                if isinstance(module, rotary_attention.RotaryAttention):
                    module.__class__ = type(module).__mro__[2]
            torch._dynamo.reset()
    for one, other in zip(kernel, own, strict=True):
        assert (one <= 2 * other + 0.01).all(), (one, other)
