"""Files of LoRA adapters: load peft's files into a model, even if they contain a head, and return adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ranker.encoders.lora import merge_adapter
from ranker.encoders.lora_layers import has_adapter, import_peft, use_own_forward
from ranker.encoders.model_folder import ADAPTER, read_object
from ranker.errors import CheckpointError

ADAPTER_FILE = "adapter_model.safetensors"
NAME = "default"  # peft's name of a model's only adapter


def base_of(folder: str | Path) -> str | None:
    """Return the name of the base model of an adapter's folder; None for any other folder or name.

    Raises:
        CheckpointError: The folder has an adapter, but not of the kind LoRA.
    """
    folder = Path(folder)
    if not (folder / ADAPTER).is_file():
        return None
    config = read_object(folder / ADAPTER)
    base = config.get("base_model_name_or_path")
    if config.get("peft_type") != "LORA" or not isinstance(base, str) or not (folder / ADAPTER_FILE).is_file():
        kind = str(config.get("peft_type") or "unknown")[:200]
        raise CheckpointError(
            f"{folder}: expected a LoRA adapter with {ADAPTER_FILE} and base_model_name_or_path, got {kind!r} of the "
            f"model {str(base)[:200]!r}; merge other kinds with peft's merge_and_unload, and name the result"
        )
    return base


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model's adapter, under the names that peft gives them in files."""
    part = f".{NAME}."
    return {name.replace(part, "."): weight for name, weight in model.named_parameters() if part in name}


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load the adapter of a folder into the adapter of a model.

    Args:
        model: The model, whose adapter has the same shape.
        folder: The adapter's folder.

    Raises:
        CheckpointError: The weights do not fit, because the adapter is for another base.
    """
    load_state(model, adapter_weights(model, folder), folder)


def adapter_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the weights of an adapter's file by their names in the model; weights of a head keep their own names."""
    stored = load_file(folder / ADAPTER_FILE)
    plain = {name.removeprefix("base_model.model."): value for name, value in stored.items()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {name.removeprefix(prefix): value for name, value in plain.items()}


def load_state(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Copy the weights of an adapter into a model's adapter.

    Raises:
        CheckpointError: A weight is missing, does not exist in the model, or has another shape.
    """
    own = adapter_state(model)
    for name in sorted(set(own) | set(state)):
        if name not in own or name not in state or own[name].shape != state[name].shape:
            got = tuple(state[name].shape) if name in state else "none"
            want = tuple(own[name].shape) if name in own else "none"
            base = str(read_object(folder / ADAPTER).get("base_model_name_or_path"))[:200]
            raise CheckpointError(
                f"{folder}: expected an adapter for this base, got one for {base!r}: {name}: expected {want}, got {got}"
            )
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def merge_folder(model: nn.Module, folder: Path) -> None:
    """Add the adapter of a folder to the weights of a model without adapters.

    Args:
        model: The base model.
        folder: The adapter's folder. Weights that the model does not have, such as a head's, are ignored.

    Raises:
        CheckpointError: The adapter is for another base.
    """
    peft = import_peft()
    try:
        config: Any = peft.LoraConfig.from_pretrained(folder)
        config.modules_to_save, config.task_type = None, None
        if isinstance(config.target_modules, set):  # full names begin with the encoder's name if the model has a head
            prefix = f"{getattr(model, 'base_model_prefix', '')}."
            config.target_modules = {target.removeprefix(prefix) for target in config.target_modules}
        peft.inject_adapter_in_model(config, model)
    except Exception as error:  # peft raises errors of any class if a configuration does not fit
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{folder}: expected an adapter for this base, got one that does not fit: {reason}"
        ) from error
    assert has_adapter(model)
    use_own_forward(model)
    state = adapter_weights(model, folder)
    load_state(model, {name: value for name, value in state.items() if ".lora_" in name}, folder)
    merge_adapter(model)
