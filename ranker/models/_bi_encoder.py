"""Shared code of DPR and ColBERT: similarities, initial weights of projections, limits of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.errors import ConfigError

SIMILARITIES = ("cosine", "dot")
ACTIVATIONS = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Check that an option is one of its possible values.

    Raises:
        ConfigError: The value is not one of the choices.
    """
    if value not in choices:
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}; got {value!r}")


def new_projection(encoder: Encoder, size: int, bias: bool, activation: str = "identity") -> nn.Sequential:
    """Return a linear layer from states to vectors of `size`, and its activation.

    The initial weights are orthogonal. Orthogonal weights keep angles as far as possible, so that training starts from
    the similarities of the encoder's states.

    Args:
        encoder: The encoder of the states.
        size: Size of a vector.
        bias: Whether the layer has biases; they start at 0.
        activation: A key of `ACTIVATIONS`.
    """
    linear = nn.Linear(encoder.dim, size, bias=bias)
    nn.init.orthogonal_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, ACTIVATIONS[activation]())


def first_numbers(encoder: Encoder, projection: nn.Sequential | None, size: int) -> nn.Sequential:
    """Return a projection whose output is the first `size` numbers of the vectors of an encoder and a projection.

    Args:
        encoder: The encoder of the states.
        projection: A linear layer and an activation, or other layers; None: the vectors are pooled states.
        size: Size of a vector.
    """
    weight = next(encoder.parameters())
    if projection is None or not isinstance(projection[0], nn.Linear) or len(projection) > 2:
        before = [] if projection is None else list(projection)
        linear = nn.Linear(vector_size(encoder, projection), size, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.eye_(linear.weight)
        return nn.Sequential(*before, linear, nn.Identity())
    old, activation = projection[0], projection[1]
    linear = nn.Linear(old.in_features, size, old.bias is not None, device=weight.device, dtype=weight.dtype)
    linear.weight.data.copy_(old.weight.data[:size])
    if old.bias is not None:
        linear.bias.data.copy_(old.bias.data[:size])
    return nn.Sequential(linear, activation)


def vector_size(encoder: Encoder, projection: nn.Sequential | None) -> int:
    """Return the size of the vectors that a projection of an encoder's states gives."""
    linears = [part for part in projection or () if isinstance(part, nn.Linear)]
    return linears[-1].out_features if linears else encoder.dim


def text_limit(encoder: Encoder, lengths: Mapping[str, Any], key: str, template: Template) -> int:
    """Return the longest text of queries or docs in tokens, special tokens not counted.

    Args:
        encoder: The encoder; its number of positions is the upper bound.
        lengths: `query_length`, `document_length` and `max_seq_length` of a folder, as far as the folder has them.
            Without these values, the tokenizer's maximum is used.
        key: `query_length` or `document_length`.
        template: The layout of a text; if it has a maximum, this maximum is used first.
    """
    longest = (
        template.max_tokens or lengths.get(key) or lengths.get("max_seq_length") or encoder.tokenizer.model_max_length
    )
    return max(1, min(int(longest), encoder.max_tokens) - template.num_added)
