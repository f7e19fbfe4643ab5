"""Linear layers with an adapter of peft: found, computed in the precision of the states, stacked, switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.encoders.adapted_linear import Siblings
from ranker.errors import ConfigError


def has_adapter(model: nn.Module) -> bool:
    """Return whether a transformers model has adapters."""
    return hasattr(model, "peft_config")


def use_own_forward(model: nn.Module) -> None:
    """Let the adapted layers of a model compute in the precision of the states."""
    for module in adapted_layers(model):
        module.__class__ = _own_layer()


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers that have an adapter."""
    layer = import_peft().tuners.lora.Linear
    return [module for module in model.modules() if isinstance(module, layer)]


def refresh_stacked(model: nn.Module, dtype: torch.dtype) -> bool:
    """Update the weights of adapted layers that are computed as one matrix product (see `adapted_linear`).

    Return whether all adapted layers can run this way.

    Args:
        model: The model.
        dtype: Precision of the model's products.
    """
    layers = adapted_layers(model)
    if not layers or not all(_stacks(layer) for layer in layers):
        return False
    for layer in layers:
        if layer.place == 0:
            layer.siblings.refresh(dtype)
    return True


def _stacks(layer: Any) -> bool:
    """Return whether a layer is a plain linear layer with one adapter and without dropout."""
    if layer.siblings is None or layer.disable_adapters or layer.merged or layer.lora_variant:
        return False
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A:
        return False
    name, base = layer.active_adapters[0], layer.get_base_layer()
    dropout = layer.lora_dropout[name]
    if (layer.training and getattr(dropout, "p", 0.0)) or layer.lora_B[name].bias is not None:
        return False
    # weights of other types are sharded or quantized, and can't be stacked
    return type(base) is nn.Linear and type(base.weight) is nn.Parameter and not base.weight.requires_grad


@contextmanager
def adapters_off(root: nn.Module) -> Iterator[None]:
    """Switch off the adapters of all models in a module; peft's own switch would also freeze the adapters."""
    layers = [layer for model in root.modules() if has_adapter(model) for layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def import_peft() -> Any:
    """Return the module peft.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora: expected the package peft; install it with: pip install -e '.[lora]'") from error
    return peft


@cache
def _own_layer() -> type:
    class Linear(import_peft().tuners.lora.Linear):  # type: ignore[misc]
        """peft's linear layer with an adapter; it computes in the precision of the states.

        Attributes:
            siblings: This layer and the others that read the same states; None before they are known.
            place: Index of this layer in `siblings`.
        """

        siblings: Siblings | None = None
        place = 0

        def forward(self, states: Tensor, *args: Any, **options: Any) -> Tensor:
            """Return the layer's output [..., outputs] for states [..., inputs]."""
            siblings = self.siblings
            if siblings is not None and self.packing.current is not None and self.packing.current.stacked:
                stacked: Tensor = siblings.output(self.place, states)
                return stacked
            if self.disable_adapters or self.merged or len(self.active_adapters) != 1 or self.lora_variant:
                result: Tensor = super().forward(states, *args, **options)
                return result
            name = self.active_adapters[0]
            first, second = self.lora_A[name].weight, self.lora_B[name].weight
            dropped = self.lora_dropout[name](states)
            low = functional.linear(dropped, first.to(states.dtype))
            output: Tensor = self.base_layer(states)
            return output + functional.linear(low, (second * self.scaling[name]).to(low.dtype)).to(output.dtype)

    return Linear
