"""Read token states by layer (`States`): stored states of `state_cache`, or random vectors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SCALES = "scales.bin"  # file of the scales, in the folder of int8 states


class States(Protocol):
    """A vector for each layer and token."""

    @property
    def dim(self) -> int:
        """Size of a vector."""
        ...

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """Copy vectors, float32 [layers, *tokens.shape, dim], to the device of `tokens`.

        Args:
            layers: Indices on the layer axis.
            tokens: Indices on the token axis, int64.
        """
        ...


class TensorStates:
    """States in a tensor: in memory, memory-mapped, or on the GPU.

    Args:
        data: The numbers [layers, tokens, dim], of any float type or int8.
        scales: Factor of each token's numbers, float32 [layers, tokens]; None: 1.
    """

    def __init__(self, data: Tensor, scales: Tensor | None = None) -> None:
        self.data, self.scales = data, scales
        self._file: tuple[Path, str, tuple[int, int, int]] | None = None

    @classmethod
    def mapped(cls, path: Path, dtype: str, shape: tuple[int, int, int]) -> TensorStates:
        """Map a file of states. A pickle has the file's name only, so that another process maps the file again.

        Args:
            path: The file; with `int8`, the scales are in `SCALES` in the same folder.
            dtype: Type of the numbers: `float16`, `float32` or `int8`.
            shape: Layers, tokens, dim.
        """
        scales = _mapped(path.with_name(SCALES), "float32", shape[:2]) if dtype == "int8" else None
        states = cls(_mapped(path, dtype, shape), scales)
        states._file = (path, dtype, shape)
        return states

    def __reduce__(self) -> tuple[Any, ...]:
        return (TensorStates, (self.data, self.scales)) if self._file is None else (TensorStates.mapped, self._file)

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        """Size of the states and scales in bytes."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device) -> TensorStates:
        """Return a copy on a device."""
        return TensorStates(self.data.to(device), None if self.scales is None else self.scales.to(device))

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """Copy vectors, see `States.gather`."""
        flat = tokens.reshape(-1).to(self.data.device)
        vectors = _pick(self.data, layers, flat).to(tokens.device, torch.float32)
        if self.scales is not None:
            vectors *= _pick(self.scales, layers, flat).to(tokens.device).unsqueeze(-1)
        return vectors.view(len(layers), *tokens.shape, self.dim)


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Tensor:
    # The file is mapped read-only, because pages that are mapped for writing count as used memory, and the file may be
    # larger than memory. The warning is for tensors that are written to, and this tensor never is.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(path, dtype=dtype, mode="r", shape=shape))


def _pick(values: Tensor, layers: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the values of some layers and tokens, [layers, tokens, ...]."""
    if len(layers) == 1:
        return values[layers[0]].index_select(0, tokens).unsqueeze(0)
    if len(layers) == len(values):
        return values.index_select(1, tokens)
    return torch.stack([values[layer].index_select(0, tokens) for layer in layers])


def quantised(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token's numbers to multiples of m / 127, where m is the token's largest absolute number.

    Args:
        states: [tokens, dim]

    Returns:
        int8 [tokens, dim], and the factor of each token, float32 [tokens].
    """
    scales = (states.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (states.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


@dataclass(frozen=True)
class RandomEmbeddings:
    """States of the control `random_embeddings`: a fixed vector from N(0, 1) for each token id. There is one layer.

    Args:
        table: float32 [vocabulary, dim].
        tokens: Token id at each index of the token axis, int64 [tokens].
    """

    table: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, tokens: np.ndarray, vocabulary: int, dim: int, seed: int, device: torch.device) -> RandomEmbeddings:
        """Draw the table with a seed.

        Args:
            tokens: Token id at each index of the token axis, int64 [tokens].
            vocabulary: Number of rows of the table.
            dim: Size of a vector.
            seed: Seed of the draw.
            device: Device of the table.
        """
        table = torch.randn(vocabulary, dim, generator=torch.Generator().manual_seed(seed))
        return cls(table.to(device), torch.from_numpy(tokens).to(device))

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.table.shape[1]

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """Copy vectors, see `States.gather`; `layers` is [0]."""
        assert list(layers) == [0], "random embeddings have one layer"
        return self.table[self.tokens[tokens]].unsqueeze(0)
