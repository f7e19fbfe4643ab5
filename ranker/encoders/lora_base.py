"""The frozen weights of models with adapters: their names, their hash, and their precision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ranker.encoders.lora_layers import has_adapter

REMEMBERED = "_ranker_base_samples"
SAMPLE = 64  # number of values of each weight that a fingerprint reads


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


def cast_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the frozen weights of a model with adapters to a dtype."""
    for weight in model.parameters():
        if not weight.requires_grad and weight.is_floating_point():  # other weights are rounded to 4 or 8 bits
            weight.data = weight.data.to(dtype)
