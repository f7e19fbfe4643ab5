"""Projections of bi-encoders as Dense modules: linear layers, each followed by its activation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ranker.export._module_weights import read_dense, write_dense
from ranker.export._modules import StoredModule


def dense_layers(projection: nn.Sequential | None) -> Iterator[tuple[nn.Linear, nn.Module]]:
    """Yield each linear layer of a projection with its activation."""
    parts: list[Any] = list(projection) if projection is not None else []
    yield from zip(parts[::2], parts[1::2], strict=True)


def read_projection(modules: Iterable[StoredModule]) -> nn.Sequential | None:
    """Read the Dense modules among the modules of a folder, in order; None if there are none.

    Raises:
        CheckpointError: See `read_dense`.
    """
    layers = [part for module in modules if module.name == "Dense" for part in read_dense(module)]
    return nn.Sequential(*layers) if layers else None


def write_projection(
    folder: Path, first: int, projection: nn.Sequential | None, prefix: str = "", extra: Mapping[str, Any] | None = None
) -> list[str]:
    """Write a projection as Dense modules; return their paths.

    Args:
        folder: The model's folder.
        first: Index of the first Dense module among the model's modules.
        projection: The projection; None writes nothing.
        prefix: Start of the paths.
        extra: More keys of each config.json.
    """
    paths = []
    for i, (linear, activation) in enumerate(dense_layers(projection), first):
        paths.append(f"{prefix}{i}_Dense")
        write_dense(folder / paths[-1], linear, activation, extra)
    return paths
