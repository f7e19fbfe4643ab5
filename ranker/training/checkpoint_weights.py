"""The weights of a training checkpoint: load them into a module; leave out those to which adapters were added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ranker.encoders.lora_base import base_fingerprint, base_names
from ranker.errors import CheckpointError
from ranker.training.checkpoint_files import read_checkpoint


def load_checkpoint(module: nn.Module, path: Path, prefix: str = "") -> None:
    """Load a training checkpoint's weights into a module of the same kind as the module that wrote it.

    Args:
        module: The module.
        path: The checkpoint.
        prefix: Only weights whose names begin with this are loaded, under the rest of their names.

    Raises:
        CheckpointError: The file is missing or damaged, or its weights do not fit.
    """
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint: expected {path}, got no such file; the run may have stopped before its first checkpoint"
        )
    try:
        content = read_checkpoint(path)
        state = content["state_dict"]
    except KeyError as error:
        raise CheckpointError(
            f"{path}: expected a training checkpoint with weights, got one without {error}"
        ) from error
    if content.get("base", "") != base_fingerprint(module):
        raise CheckpointError(
            f"{path}: expected adapters for the weights of encoder.name, got adapters of another base; set "
            "encoder.name to the base that the training used"
        )
    weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    expected = module.state_dict()
    # a checkpoint does not contain the base weights of adapters; the module has them, from encoder.name
    for key in base_names(module) - set(weights):
        weights[key] = expected[key]
    for key in sorted(set(weights) | set(expected)):
        if key not in weights or key not in expected or weights[key].shape != expected[key].shape:
            got = tuple(weights[key].shape) if key in weights else "no such weight"
            want = tuple(expected[key].shape) if key in expected else "no such weight"
            raise CheckpointError(
                f"{path}: weight {key}: expected {want}, got {got}; the configuration differs from the checkpoint's"
            )
    module.load_state_dict(weights)


def leave_out_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Remove the frozen weights to which adapters were added from the `checkpoint` of a module."""
    base = base_names(module)
    if base:
        checkpoint["base"] = base_fingerprint(module)
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name not in base}


def add_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Add the weights that `leave_out_base` left out to a `checkpoint`; the module has them, from `encoder.name`.

    Raises:
        CheckpointError: The checkpoint's adapters were trained on other weights than those of `encoder.name`.
    """
    if checkpoint.get("base", "") != base_fingerprint(module):
        raise CheckpointError(
            "checkpoint: expected adapters for the weights of encoder.name, got adapters for other weights; the "
            "folder that encoder.name names has changed"
        )
    base = base_names(module)
    if base:
        weights = module.state_dict()
        checkpoint["state_dict"] |= {name: weights[name] for name in base}
