"""Load the weights of a training checkpoint into a module."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ranker.encoders.lora import base_fingerprint, base_names
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
