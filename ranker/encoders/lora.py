"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685) in an encoder, created with the library peft.

The base is frozen. Each chosen linear layer y = W x becomes y = W x + (alpha / rank) B A x with trained A and B. peft
creates and initializes these layers, and defines the format of their files. The forward pass is this package's own: it
computes in the precision of the states, while peft converts the states to the precision of A and B. On CUDA in half
precision, an adapter becomes a part of its layer's matrix product (`adapted_linear`). `Packing.find_dropout` replaces
all dropout modules, peft's included, by modules whose masks come from a hash of the token's position in the step. So
masks do not depend on how a step is split.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ranker.encoders.lora_layers import adapted_layers, import_peft, use_own_forward
from ranker.encoders.quantized_base import plain_base
from ranker.errors import ConfigError

PRECISIONS, ROUNDED = ("float32", "bfloat16"), ("int8", "nf4")
GROUPS = ("attention", "mlp", "all-linear")


@dataclass(frozen=True)
class LoRA:
    """Options of the adapters.

    Args:
        rank: Number of rows of A and of columns of B.
        alpha: B A is scaled by alpha / rank.
        dropout: Dropout rate before A.
        targets: Layers that get an adapter: `attention`, `mlp`, `all-linear`, or a list of module names such as
            `[q_proj, v_proj]`.
        base: Precision of the frozen weights: `float32` or `bfloat16`, or `int8` or `nf4` (4 bits) with bitsandbytes,
            see `ranker.encoders.quantized_base`.
        merge: Whether a training also writes `merged/`, the model whose weights include the adapters.

    Raises:
        ConfigError: A value is out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    base: str = "float32"
    merge: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"encoder.lora.rank: expected at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ConfigError(f"encoder.lora.alpha: expected a number above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"encoder.lora.dropout: expected at least 0 and below 1, got {self.dropout}")
        if self.base not in (*PRECISIONS, *ROUNDED):
            raise ConfigError(
                f"encoder.lora.base: expected one of {', '.join((*PRECISIONS, *ROUNDED))}; got {self.base!r}"
            )
        if self.base in ROUNDED and importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                f"encoder.lora.base: expected the package bitsandbytes for {self.base}, which is not installed; pip "
                "install bitsandbytes, or set encoder.lora.base=bfloat16"
            )
        if isinstance(self.targets, str) and self.targets not in GROUPS:
            raise ConfigError(
                f"encoder.lora.targets: expected {', '.join(GROUPS)} or a list of names, got {self.targets!r}"
            )


def add_adapter(model: nn.Module, options: LoRA) -> None:
    """Freeze a model and add adapters, which have no effect before they are trained.

    Args:
        model: A transformers model.
        options: Options of the adapters.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
    """
    peft = import_peft()
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=_targets(model, options.targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model)
    use_own_forward(model)


def _targets(model: nn.Module, targets: str | list[str]) -> list[str]:
    """Return names of modules for peft, each as short as it can be without being ambiguous."""
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    inside = [name for name in linear if re.search(r"\.\d+\.", f".{name}")]
    if not isinstance(targets, str):
        unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
        if unknown or not targets:
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"encoder.lora.targets: expected names of linear layers ({', '.join(names)}), got {', '.join(unknown)}"
            )
        return list(targets)
    attention = [name for name in inside if re.search("attn|attention", name.lower())]
    chosen = {"attention": attention, "mlp": [name for name in inside if name not in attention], "all-linear": inside}
    wanted = set(chosen[targets])
    if not wanted:
        raise ConfigError(f"encoder.lora.targets: expected layers that the model has, got {targets}, which it lacks")
    short = sorted({re.split(r"(?:^|\.)\d+\.", name)[-1] for name in wanted})
    found = {name for name in linear if any(f".{name}".endswith(f".{part}") for part in short)}
    return short if found == wanted else sorted(wanted)


def merge_adapter(model: nn.Module) -> None:
    """Add the adapters to the weights, in float32 or float64, and remove the adapters."""
    plain_base(model)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    adapted: dict[nn.Module, Any] = {layer: layer for layer in adapted_layers(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in adapted:
                adapted[child].merge()
                base = adapted[child].get_base_layer()
                base.weight.data = base.weight.data.contiguous()  # the weight may be a view of stacked weights
                setattr(parent, name, base)
    del model.peft_config
    model.requires_grad_(True)
