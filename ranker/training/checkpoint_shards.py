"""Checkpoints in parts, one for each device: `last.ckpt` of the first device, `last.ckpt.1` of the second, and so on.

A part is a checkpoint file that contains the shards of one device instead of whole tensors. All parts together have the
content of a checkpoint in one file. So any number of devices, with or without shards, can resume from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARDS = "shards"  # key of a part: the number of parts, this part's index, the step, and the paths of sharded tensors
NEW = ".new"  # suffix of a part until all parts are written


def part_of(path: Path, number: int) -> Path:
    """Return the file of a device's part.

    >>> part_of(Path("last.ckpt"), 0).name, part_of(Path("last.ckpt"), 2).name
    ('last.ckpt', 'last.ckpt.2')
    """
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def other_parts(path: Path) -> list[Path]:
    """Return the files of all parts of a checkpoint except the first; empty for a checkpoint in one file."""
    found: list[Path] = []
    while part_of(path, len(found) + 1).is_file():
        found.append(part_of(path, len(found) + 1))
    return found


def as_part(checkpoint: dict[str, Any], number: int, count: int, sharded: list[str]) -> dict[str, Any]:
    """Return a device's part of a checkpoint.

    Args:
        checkpoint: The checkpoint with this device's shards.
        number: Index of the device.
        count: Number of devices.
        sharded: Paths of the tensors that are shards, see `leaves`.
    """
    about = {"number": number, "count": count, "step": int(checkpoint["global_step"]), "sharded": sharded}
    kept = checkpoint if number == 0 else {key: checkpoint[key] for key in ("state_dict", "optimizer_states")}
    return kept | {SHARDS: about}


def fault_of_parts(first: dict[str, Any], others: list[dict[str, Any]]) -> str | None:
    """Return why parts do not belong to one checkpoint; None if they do.

    Args:
        first: Content of the first part.
        others: Content of the parts that were found beside it.
    """
    about = first[SHARDS]
    if len(others) + 1 < about["count"]:
        return f"{len(others) + 1} of {about['count']} parts"
    parts = [part.get(SHARDS, {}) for part in others[: about["count"] - 1]]
    if any(part.get("step") != about["step"] or part.get("count") != about["count"] for part in parts):
        return "parts of different steps"
    return None


def joined(first: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole checkpoint that consists of these parts, given in the order of the devices."""
    about = first.pop(SHARDS)
    parts = [dict(leaves(part)) for part in others[: about["count"] - 1]]
    sharded = set(about["sharded"])

    def whole(path: str, value: Any) -> Any:
        return torch.cat([value, *(part[path] for part in parts)]) if path in sharded else value

    result: dict[str, Any] = mapped(first, whole)
    return result


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a nested state with its path."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, entry in entries:
        yield from [(f"{path}/{key}", entry)] if isinstance(entry, Tensor) else leaves(entry, f"{path}/{key}")


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of a nested state in which each tensor is replaced.

    Args:
        value: The state.
        change: Returns the replacement for a path and a tensor.
        path: Path of the state itself.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: mapped(entry, change, f"{path}/{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(entry, change, f"{path}/{i}") for i, entry in enumerate(value))
    return value
