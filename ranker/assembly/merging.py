"""Merge the weights of several models of one architecture into one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ranker.errors import ConfigError
from ranker.models.interface import Scorer


def merge_scorers(scorers: Mapping[str, Scorer], shares: Sequence[float] | None, interpolation: str) -> Scorer:
    """Return the first scorer with merged weights.

    Args:
        scorers: Name -> scorer, as messages name them; at least two.
        shares: A number of at least 0 for each scorer, not all 0; None: equal ones.
        interpolation: `linear` is the weighted mean (model soups, Wortsman et al. 2022, arXiv 2203.05482). `slerp`
            moves each of two scorers' tensors along the arc between them (Shoemake 1985), to the second one's share.

    Raises:
        ConfigError: The scorers differ in architecture or vocabulary.
    """
    given = [1.0] * len(scorers) if shares is None else [float(share) for share in shares]
    parts = [share / sum(given) for share in given]
    (first_name, first), *others = scorers.items()
    for name, scorer in others:
        _check_fit(first_name, first, name, scorer)
    states = [scorer.state_dict() for scorer in scorers.values()]
    merged = {}
    for name, tensor in states[0].items():
        tensors = [state[name] for state in states]
        if not tensor.is_floating_point():
            merged[name] = tensor
        elif interpolation == "slerp":
            merged[name] = slerp(tensors[0], tensors[1], parts[1])
        else:
            merged[name] = linear(tensors, parts)
    module: Any = first
    module.load_state_dict(merged)
    return first


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape, computed in float64; equal tensors stay as they are.

    Args:
        tensors: The tensors.
        shares: A number for each tensor; their sum is 1.
    """
    first = tensors[0].double()
    moved = sum(share * (tensor.double() - first) for share, tensor in zip(shares, tensors, strict=True))
    return (first + moved).to(tensors[0].dtype)


def slerp(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the point at `share` of the arc from one tensor to another, both seen as vectors, computed in float64.

    With angle a between the vectors: (sin((1 - share) a) one + sin(share a) other) / sin(a). Vectors in one line, and
    tensors of zeros, have no arc; they get their weighted mean.

    Args:
        one: A tensor.
        other: A tensor of its shape.
        share: Between 0 (`one`) and 1 (`other`).
    """
    first, second = one.double(), other.double()
    lengths = first.norm() * second.norm()
    cosine = float((first * second).sum() / lengths) if lengths > 0 else 1.0
    if abs(cosine) > 1 - 1e-12:
        return linear([one, other], [1 - share, share])
    angle = torch.arccos(torch.tensor(cosine, dtype=torch.float64))
    ends = torch.sin((1 - share) * angle) * first + torch.sin(share * angle) * second
    return (ends / torch.sin(angle)).to(one.dtype)


def _check_fit(first_name: str, first: Scorer, name: str, scorer: Scorer) -> None:
    """Refuse a scorer of another architecture or vocabulary than the first."""
    one: Any = first
    other: Any = scorer
    if type(one) is not type(other):
        names = type(one).__name__, type(other).__name__
        raise ConfigError(
            f"runs: expected models of one class, got {names[0]} in {first_name} and {names[1]} in {name}"
        )
    shapes, given = ({key: tuple(t.shape) for key, t in part.state_dict().items()} for part in (one, other))
    key = next((key for key in {**shapes, **given} if shapes.get(key) != given.get(key)), None)
    if key is not None:
        raise ConfigError(
            f"runs: expected models of one architecture, got {key} of shape {_shape(shapes, key)} in {first_name} and "
            f"{_shape(given, key)} in {name}"
        )
    if one.encoder.tokenizer.get_vocab() != other.encoder.tokenizer.get_vocab():
        raise ConfigError(f"runs: expected models of one vocabulary, got others in {first_name} and {name}")


def _shape(shapes: Mapping[str, tuple[int, ...]], key: str) -> str:
    return " x ".join(map(str, shapes[key])) if key in shapes else "none"
