"""A cross-encoder as a model folder stores it: encoder and head."""

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
        head: The output layer, with 1 or 2 outputs, or the own head of a family's classification model.
        pooling: The states that an output layer reads, see `ranker.interactions.pooling`; `auto` for a family's own
            head.
        dense: A linear layer between pooling and output layer. A tanh follows it. None: neither of the two exists.
        dropout: Dropout rate before the output layer, or in a family's own head.
    """

    encoder: Encoder
    head: nn.Linear | NativeHead
    pooling: str = "auto"
    dense: nn.Linear | None = None
    dropout: float = 0.0
