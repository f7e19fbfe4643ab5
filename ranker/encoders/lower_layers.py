"""Make a model of another model's lower layers, with shared weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ranker.encoders.text_model import keep_layers
from ranker.errors import ConfigError

# names of the norm after the last layer in pre-norm models; the module with the list of layers also has this norm
FINAL_NORMS = ("final_norm", "norm", "final_layer_norm", "final_layernorm", "ln_f")


def layers_of(model: nn.Module, total: int) -> tuple[nn.Module, str]:
    """Return the module that holds a model's list of layers, and the list's name in this module.

    Args:
        model: A transformers model.
        total: Number of the model's layers.

    Raises:
        ConfigError: The model does not have exactly one module list with `total` modules.
    """
    found = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(found) != 1:
        config: Any = model.config
        raise ConfigError(
            f"encoder: expected a model with one list of {total} layers to take the lower ones, got {len(found)} "
            f"({config.model_type})"
        )
    return found[0]


def final_norm(model: nn.Module, total: int) -> nn.Module | None:
    """Return the norm after a model's last layer; None if there is none.

    Args:
        model: A transformers model.
        total: Number of the model's layers.
    """
    holder, _ = layers_of(model, total)
    return next((getattr(holder, name) for name in FINAL_NORMS if hasattr(holder, name)), None)


def with_lower_layers(encoder: Any, layers: int) -> Any:
    """Return a copy of an `Encoder` without the upper layers of its model. Both share the weights.

    Args:
        encoder: The encoder.
        layers: Number of layers to keep.

    Raises:
        ConfigError: The encoder has fewer layers, or its layers are not in one list.
    """
    layers_of(encoder.model, encoder.num_layers)
    shared = [*encoder.model.parameters(), *encoder.model.buffers()]
    copied = copy.deepcopy(encoder, {id(weight): weight for weight in shared})
    keep_layers(copied.model.config, layers, copied.model.config.name_or_path)
    holder, name = layers_of(copied.model, encoder.num_layers)
    setattr(holder, name, getattr(holder, name)[:layers])
    return copied
