"""Frozen weights of adapted layers in 4 or 8 bits, with bitsandbytes (QLoRA, Dettmers et al., 2023, arXiv:2305.14314).

`nf4` rounds each weight to one of the 16 values of NormalFloat, with a scale for each block of 64. `int8` rounds rows
to 8 bits, and computes columns with large inputs in half precision (LLM.int8, arXiv:2208.07339).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.lora_base import cast_base, remember_base
from ranker.encoders.lora_layers import adapted_layers
from ranker.errors import ConfigError


def quantize_base(model: nn.Module, kind: str) -> None:
    """Round the frozen weights of adapted layers; convert the other frozen weights to bfloat16.

    Args:
        model: A transformers model with adapters.
        kind: `nf4` or `int8`.

    Raises:
        ConfigError: An adapted layer is no linear layer of torch.
    """
    remember_base(model)  # before rounding, because the base's fingerprint must not depend on its precision
    for layer in adapted_layers(model):
        if type(layer.base_layer) is not nn.Linear:
            raise ConfigError(
                f"encoder.lora.base: expected float32 or bfloat16, since {type(layer.base_layer).__name__} has no form "
                f"in {kind}; got {kind}"
            )
        layer.siblings = None  # rounded weights can't be stacked with those of other layers
        layer.base_layer = rounded_layer(layer.base_layer, kind)
    cast_base(model, torch.bfloat16)


def rounded_layer(linear: nn.Linear, kind: str) -> nn.Module:
    """Return a linear layer with rounded weights. No state dict contains these weights.

    Args:
        linear: The layer.
        kind: `nf4` or `int8`.
    """
    from bitsandbytes import nn as library

    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    weight = linear.weight.detach().contiguous()
    rounded: Any
    if kind == "nf4":
        rounded = library.Linear4bit(*sizes, quant_type="nf4")  # computes in the precision of the states
        rounded.weight = library.Params4bit(weight, requires_grad=False, quant_type="nf4", module=rounded)
    else:
        rounded = library.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        rounded.weight = library.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    if linear.bias is not None:
        rounded.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    layer: Any = type(rounded)
    rounded.__class__ = _stateless(layer)
    return rounded.to(weight.device)  # type: ignore[no-any-return]


@cache
def _stateless(layer: type) -> type:
    """Return a subclass of a layer whose weights are in no state dict, since the configuration names their origin."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return type(layer.__name__, (layer,), {"_save_to_state_dict": nothing, "_load_from_state_dict": nothing})


def plain_base(model: nn.Module) -> None:
    """Replace the rounded weights of adapted layers by linear layers in float32 with the rounded values."""
    for layer in adapted_layers(model):
        if type(layer.base_layer).__name__ in ("Linear4bit", "Linear8bitLt"):
            layer.base_layer = dequantized(layer.base_layer)


def dequantized(linear: Any) -> nn.Linear:
    """Return a rounded layer as a linear layer in float32, with the rounded values."""
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    with torch.no_grad():
        plain.weight.copy_(_values(linear))
        if linear.bias is not None:
            plain.bias.copy_(linear.bias)
    return plain.requires_grad_(False)


def _values(linear: Any) -> Tensor:
    """Return the values of a rounded weight [outputs, inputs]."""
    weight = linear.weight
    if type(linear).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        values: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return values.float().cpu()
    factors = linear.state.SCB if weight.SCB is None else weight.SCB  # largest absolute value of each row
    return weight.data.float().cpu() * factors.float().cpu().unsqueeze(1) / 127
