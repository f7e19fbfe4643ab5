"""A cross-encoder: encoder and head, as model folders hold it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ranker.encoders.encoder import Encoder
from ranker.encoders.native_head import NativeHead


@dataclass
class Classifier:
    """A cross-encoder: encoder and head.

    Args:
        encoder: The encoder.
        head: The output layer, with 1 or 2 outputs, or a family's own head.
        pooling: What an output layer reads, see `ranker.interactions.pooling`; `auto` with a family's own head.
        dense: The linear layer after pooling, which a tanh follows; None: neither the layer nor the tanh.
        dropout: Dropout rate before the output layer, or in a family's own head.
    """

    encoder: Encoder
    head: nn.Linear | NativeHead
    pooling: str = "auto"
    dense: nn.Linear | None = None
    dropout: float = 0.0
