"""Where a probe's inputs come from: cached states, random embeddings, or surface features."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SCALES = "scales.bin"  # beside states in int8


class States(Protocol):
    """Vectors of tokens, by layer."""

    @property
    def dim(self) -> int:
        """Size of a vector."""
        ...

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """Vectors float32 [layers, *tokens.shape, dim], on the device of `tokens`.

        Args:
            layers: Positions on the states' layer axis.
            tokens: Positions on their token axis, int64.
        """
        ...


class TensorStates:
    """States in a tensor, perhaps memory-mapped, perhaps on the GPU.

    Args:
        data: [layers, tokens, dim], any float type, or int8.
        scales: What each token's numbers are multiplied by, float32 [layers, tokens]; None: they are the states
            themselves.
    """

    def __init__(self, data: Tensor, scales: Tensor | None = None) -> None:
        self.data, self.scales = data, scales
        self._file: tuple[Path, str, tuple[int, int, int]] | None = None

    @classmethod
    def mapped(cls, path: Path, dtype: str, shape: tuple[int, int, int]) -> TensorStates:
        """States in a file, those in int8 with their scales beside it (`SCALES`); another process that gets them maps the files again."""
        scales = _mapped(path.with_name(SCALES), "float32", shape[:2]) if dtype == "int8" else None
        made = cls(_mapped(path, dtype, shape), scales)
        made._file = (path, dtype, shape)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (TensorStates, (self.data, self.scales)) if self._file is None else (TensorStates.mapped, self._file)

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device) -> TensorStates:
        """The same on a device."""
        return TensorStates(self.data.to(device), None if self.scales is None else self.scales.to(device))

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """See States."""
        flat = tokens.reshape(-1).to(self.data.device)
        found = _pick(self.data, layers, flat).to(tokens.device, torch.float32)
        if self.scales is not None:
            found *= _pick(self.scales, layers, flat).to(tokens.device).unsqueeze(-1)
        return found.view(len(layers), *tokens.shape, self.dim)


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Tensor:
    # read-only, since a file that is mapped for writing counts as memory, and may be larger than that; nothing is ever
    # written to it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(path, dtype=dtype, mode="r", shape=shape))


def _pick(values: Tensor, layers: Sequence[int], tokens: Tensor) -> Tensor:
    """[layers, tokens, ...] of some layers and tokens."""
    if len(layers) == 1:
        return values[layers[0]].index_select(0, tokens).unsqueeze(0)
    if len(layers) == len(values):
        return values.index_select(1, tokens)
    return torch.stack([values[layer].index_select(0, tokens) for layer in layers])


def quantised(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token's numbers to 127ths of its largest; int8 like `states` [tokens, dim], and float32 [tokens] to multiply by."""
    scales = (states.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (states.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


@dataclass(frozen=True)
class RandomEmbeddings:
    """The published control: a frozen table of N(0, 1), read at the token's id; one layer.

    Args:
        table: float32 [vocabulary, dim].
        tokens: Token id at each position of the token axis, int64 [tokens].
    """

    table: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, tokens: np.ndarray, vocabulary: int, dim: int, seed: int, device: torch.device) -> RandomEmbeddings:
        """Draw the table by seed."""
        table = torch.randn(vocabulary, dim, generator=torch.Generator().manual_seed(seed))
        return cls(table.to(device), torch.from_numpy(tokens).to(device))

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.table.shape[1]

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """See States."""
        assert list(layers) == [0], "random embeddings have one layer"
        return self.table[self.tokens[tokens]].unsqueeze(0)
