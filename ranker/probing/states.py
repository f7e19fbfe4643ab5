"""Where a probe's inputs come from: cached states, random embeddings, or surface features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


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
        data: [layers, tokens, dim], any float type.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._file: tuple[Path, str, tuple[int, int, int]] | None = None

    @classmethod
    def mapped(cls, path: Path, dtype: str, shape: tuple[int, int, int]) -> TensorStates:
        """States in a file; another process that gets them maps the file again."""
        # copy-on-write, since torch wants writable memory; nothing is ever written to it
        made = cls(torch.from_numpy(np.memmap(path, dtype=dtype, mode="c", shape=shape)))
        made._file = (path, dtype, shape)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (TensorStates, (self.data,)) if self._file is None else (TensorStates.mapped, self._file)

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.data.shape[2]

    def gather(self, layers: Sequence[int], tokens: Tensor) -> Tensor:
        """See States."""
        flat = tokens.reshape(-1).to(self.data.device)
        shape = (len(layers), *tokens.shape, self.dim)
        if len(layers) == 1:
            found = self.data[layers[0]].index_select(0, flat)
        elif len(layers) == len(self.data):
            found = self.data.index_select(1, flat)
        else:
            found = torch.stack([self.data[layer].index_select(0, flat) for layer in layers])
        return found.to(tokens.device, torch.float32).view(shape)


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
