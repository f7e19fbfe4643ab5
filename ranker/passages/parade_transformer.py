"""PARADE's transformer over window vectors (Li et al., 2020, arXiv:2008.09093)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError

HEAD_DIM = 64  # size of an attention head in BERT


class ParadeTransformer(nn.Module):
    r"""Represent a doc by a transformer over its window vectors.

    .. math:: d = \mathrm{Transformer}(c, p_1, \dots, p_n)_c

    with a trained vector c. The layers are BERT's, initialized at random: post-norm, GELU, an inner size of 4 times
    `dim`. As in the paper, windows have no position embeddings. There are two differences. In the paper, c is the
    encoder's embedding of `[CLS]`; here c is initialized at random. The paper uses dropout; here there is none, so that
    the result does not depend on the number of devices and micro-batches.

    Args:
        dim: Size of a vector.
        layers: Number of layers.
        heads: Number of attention heads; None: one for every 64 values of a vector.

    Raises:
        ConfigError: `layers` is below 1, or `heads` does not divide the size of a vector.
    """

    reads = "vectors"

    def __init__(self, dim: int, layers: int = 2, heads: int | None = None) -> None:
        super().__init__()
        if layers < 1:
            raise ConfigError(f"passages.layers: expected at least 1, got {layers}")
        heads = max(1, dim // HEAD_DIM) if heads is None else heads
        if heads < 1 or dim % heads:
            raise ConfigError(f"passages.heads: expected a divisor of {dim}, the size of a vector, got {heads}")
        self.heads = heads
        self.start = nn.Parameter(torch.empty(dim).normal_(std=0.02))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        )

    def extra_repr(self) -> str:
        """Return the number of heads as text; the layers do not show it."""
        return f"heads={self.heads}"

    def forward(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of docs [docs, dim].

        Args:
            vectors: Vectors of the docs' windows [docs, windows, dim]; 0 in padding.
            mask: True for windows, False for padding, bool [docs, windows].
        """
        states = torch.cat([self.start.expand(len(vectors), 1, -1), vectors], dim=1)
        padding = ~torch.cat([mask.new_ones(len(mask), 1), mask], dim=1)
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=padding)
        return states[:, 0]
