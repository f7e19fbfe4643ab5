"""Run `post_norm_layer`, `pre_norm_layer` and dropout through `torch.compile`.

One layer is compiled instead of the whole encoder. This takes a twelfth of the time and does not change the keys of the
state dict. DDP can also send the gradients of a layer while lower layers still run backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ranker.encoders.attention import PackedRows, triton_unavailable
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.layer import LayerFunctions, LayerSettings, LayerWeights, post_norm_layer
from ranker.encoders.pre_norm_layer import PreNormFunctions, PreNormSettings, PreNormWeights, Rotary, pre_norm_layer


def compile_layers(model: nn.Module) -> int:
    """Compile the layers of a transformers model in place, for any number of tokens; return the number of layers.

    These parts stay outside of the compiled code: attention with padding, soft caps or biases, and the reading of
    dropout hashes.
    """
    _configure()
    for module in model.modules():
        for key, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", "").startswith("transformers.utils."):
                module._forward_hooks[key] = _when_all_layers(hook)
    layers: list[nn.Module] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:  # ALBERT: compile the modules of its first module list
        layers = next((list(module) for module in model.modules() if isinstance(module, nn.ModuleList)), [])
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def _when_all_layers(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs only if a pass returns all states; transformers collects states with it, uncompiled."""

    def call(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        forward = module.packing.current
        return None if forward is not None and forward.last_only else hook(module, inputs, output)

    return call


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    _configure()
    return torch.compile(function)


def _configure() -> None:
    config: Any = torch._dynamo.config  # type: ignore[attr-defined]
    # otherwise torch would split the function at DDP's buckets, although one layer fills at most one bucket
    config.optimize_ddp = False
    # dropout rates and epsilons become constants; dropout with a variable rate would not be fused into the kernels
    config.specialize_float = True
    # otherwise an encoder of another width would turn widths into variables, see `hashed_dropout`
    config.automatic_dynamic_shapes = False
    # one function runs all encoders of a process, in training and evaluation; beyond the limit, torch runs it eagerly
    config.recompile_limit = 64


def compiled_layer(
    states: Tensor,
    weights: LayerWeights,
    settings: LayerSettings,
    functions: LayerFunctions,
    rows: PackedRows,
    hashes: Tensor | None,
    first_tokens: Tensor | None,
) -> Tensor:
    """Run `post_norm_layer`, compiled for any number of tokens and rows, with its arguments and result."""
    _mark_dynamic(
        (states, 0),
        (rows.cu_seqlens, 0),
        (rows.cu_keys, 0),
        (rows.key_indices, 0),
        (rows.blocks, 0),
        (hashes, 1),
        (first_tokens, 0),
    )
    return _compiled(post_norm_layer)(states, weights, settings, functions, rows, hashes, first_tokens)


def compiled_pre_norm_layer(
    states: Tensor,
    weights: PreNormWeights,
    settings: PreNormSettings,
    functions: PreNormFunctions,
    rows: PackedRows,
    rotary: Rotary,
    hashes: tuple[Tensor | None, Tensor | None],
    first_tokens: Tensor | None,
) -> Tensor:
    """Run `pre_norm_layer`, compiled for any number of tokens and rows, with its arguments and result."""
    _mark_dynamic(
        (states, 0),
        (rows.cu_seqlens, 0),
        (rows.cu_keys, 0),
        (rows.key_indices, 0),
        (rows.blocks, 0),
        (rotary.position_ids, 0),
        (hashes[0], 0),
        (hashes[1], 0),
        (first_tokens, 0),
    )
    return _compiled(pre_norm_layer)(states, weights, settings, functions, rows, rotary, hashes, first_tokens)


def compiled_dropout(states: Tensor, hashes: Tensor, rate: float) -> Tensor:
    """Run `hashed_dropout`, compiled for any number of tokens as one kernel instead of a dozen."""
    _mark_dynamic((states, 0), (hashes, 0))
    return _compiled(hashed_dropout)(states, hashes, rate)


def _mark_dynamic(*varying: tuple[Tensor | None, int]) -> None:
    """Tell torch.compile along which axis the size of each tensor differs between batches."""
    for tensor, axis in varying:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)  # type: ignore[attr-defined]


def compile_unavailable(device: torch.device) -> str:
    """Return why layers can't be compiled here; empty if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    return triton_unavailable()
