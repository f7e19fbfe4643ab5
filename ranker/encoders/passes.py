"""The options of a forward pass and its result. All paths use them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from torch import Tensor


class Output(Enum):
    """States that a forward pass returns."""

    ALL_LAYERS = "the states of all tokens after the embeddings and after each layer"
    LAST_LAYER = "the last layer's states of all tokens"
    FIRST_TOKENS = "the last layer's state of each row's first token"
    ATTENTION = "the states of ALL_LAYERS, then each layer's attention weights [tokens, heads, columns]"


class Begin(NamedTuple):
    """The point from which a forward pass continues.

    Args:
        layer: Number of layers that have already run.
        states: The states after these layers, [tokens, dim].
    """

    layer: int
    states: Tensor


class ForwardPass(NamedTuple):
    """One forward pass of an encoder. Nothing is computed before the iterator is read.

    Args:
        states: States in the order of the layers, [tokens, dim]. Without padding, they may be in half precision, and
            may have padding tokens at the end. With `Output.LAST_LAYER`, states of lower layers may be left out. With
            `Output.FIRST_TOKENS`, the last states are [rows, dim]; padding rows may follow at the end.
        computed_tokens: Tokens that the layers work on, padding included.
    """

    states: Iterator[Tensor]
    computed_tokens: int
