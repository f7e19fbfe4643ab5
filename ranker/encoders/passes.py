"""Request and result of a forward pass, the same for every path."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from torch import Tensor


class Output(Enum):
    """States that a forward pass returns."""

    ALL_LAYERS = "the embeddings' and each layer's states of all tokens"
    LAST_LAYER = "the last layer's states of all tokens"
    FIRST_TOKENS = "the last layer's state of each row's first token"
    ATTENTION = "the embeddings' and each layer's states, then each layer's attention weights [tokens, heads, columns]"


class Begin(NamedTuple):
    """The point from which a forward pass continues.

    Args:
        layer: Number of layers that have run.
        states: The states after them, [tokens, dim].
    """

    layer: int
    states: Tensor


class ForwardPass(NamedTuple):
    """One forward pass of an encoder; nothing runs before the iterator is read.

    Args:
        states: States in order of the layers, [tokens, dim]. Without padding they may be in half precision and have
            padding tokens at the end. `Output.LAST_LAYER` may leave out all but the last. With `Output.FIRST_TOKENS`
            the last is [rows, dim], perhaps with padding rows at the end.
        computed_tokens: Tokens that the layers work on, padding included.
    """

    states: Iterator[Tensor]
    computed_tokens: int
