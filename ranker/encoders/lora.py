"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685) in an encoder, created with the library peft.

The base is frozen. Each chosen linear layer y = W x becomes y = W x + (alpha / rank) B A x with trained A and B. peft
creates and initializes these layers, and defines the format of their files. The forward pass is this package's own: it
computes in the precision of the states, while peft converts the states to the precision of A and B. On CUDA in half
precision, an adapter becomes a part of its layer's matrix product (`adapted_linear`). `Packing.find_dropout` replaces
all dropout modules, peft's included, by modules whose masks come from a hash of the token's position in the step. So
masks do not depend on how a step is split.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ranker.encoders.adapted_linear import Siblings
from ranker.errors import ConfigError

PRECISIONS, ROUNDED = ("float32", "bfloat16"), ("int8", "nf4")
GROUPS = ("attention", "mlp", "all-linear")
REMEMBERED = "_ranker_base_samples"
SAMPLE = 64  # number of values of each weight that a fingerprint reads


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


def has_adapter(model: nn.Module) -> bool:
    """Return whether a transformers model has adapters."""
    return hasattr(model, "peft_config")


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


def cast_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the frozen weights of a model with adapters to a dtype."""
    for weight in model.parameters():
        if not weight.requires_grad and weight.is_floating_point():  # other weights are rounded to 4 or 8 bits
            weight.data = weight.data.to(dtype)


def merge_adapter(model: nn.Module) -> None:
    """Add the adapters to the weights, in float32 or float64, and remove the adapters."""
    from ranker.encoders.quantized_base import plain_base  # that module imports this one

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


def base_names(root: nn.Module) -> set[str]:
    """Find the models with adapters inside a module; return their frozen weights' names in the module's state dict."""
    names: set[str] = set()
    for path, module in root.named_modules():
        if has_adapter(module):
            prefix = f"{path}." if path else ""
            trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
            names |= {prefix + name for name in module.state_dict() if name not in trained}
    return names


def base_fingerprint(root: nn.Module) -> str:
    """Hash the frozen weights of all models with adapters inside a module.

    The hash covers each weight's name, its size and some of its values. It does not depend on the precision of the
    weights (`LoRA.base`). It is empty if there are no adapters.
    """
    digest = hashlib.blake2b(digest_size=16)
    empty = True
    for model in (module for module in root.modules() if has_adapter(module)):
        for part in getattr(model, REMEMBERED, None) or _samples(model):
            empty = False
            digest.update(part)
    return "" if empty else digest.hexdigest()


def remember_base(model: nn.Module) -> None:
    """Store the values that `base_fingerprint` reads. Call this before the frozen weights of a model are rounded."""
    setattr(model, REMEMBERED, _samples(model))


def _samples(model: nn.Module) -> list[bytes]:
    """Return name, size and some values of each frozen weight of a model."""
    samples = []
    for name, weight in _base_weights(model):
        values = weight.detach().flatten()
        some = values[:: max(1, len(values) // SAMPLE)][:SAMPLE].to("cpu", torch.bfloat16).float()
        samples.append(f"{name} {tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return samples


def _base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            yield name.replace(".base_layer.", "."), weight
