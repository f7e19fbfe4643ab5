"""Merge the weights of several models of one architecture into one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ranker.errors import ConfigError
from ranker.export._cut import layer_of
from ranker.models.interface import Scorer, scoring_options

Shares = Mapping[str, Sequence[float]]  # group of weights -> share of each scorer in the mean; shares sum to 1
OUTSIDE = "outside"  # the group of all weights that belong to no layer


def merge_scorers(scorers: Mapping[str, Scorer], shares: Sequence[float] | None, interpolation: str) -> Scorer:
    """Return the first scorer with merged weights.

    Args:
        scorers: Name (for messages) -> scorer; at least two scorers.
        shares: Weight of each scorer in the mean, at least 0 and not all 0; None: equal weights.
        interpolation: `linear` is the weighted mean (model soups, Wortsman et al. 2022, arXiv 2203.05482). `slerp`,
            for two scorers, interpolates between their tensors on an arc (Shoemake 1985); its position is the second
            scorer's share.

    Raises:
        ConfigError: The scorers differ in architecture or vocabulary.
    """
    given = [1.0] * len(scorers) if shares is None else [float(share) for share in shares]
    merged = Merged(scorers, interpolation)
    return merged.at({key: [share / sum(given) for share in given] for key in merged.groups})


class Merged:
    """Scorers of one architecture whose weights `at` merges, with shares given at each call.

    Args:
        scorers: As in `merge_scorers`.
        interpolation: As in `merge_scorers`.

    Attributes:
        groups: Names of the groups of weights: `outside` (embeddings and head) and each layer.

    Raises:
        ConfigError: The scorers differ in architecture or vocabulary.
    """

    def __init__(self, scorers: Mapping[str, Scorer], interpolation: str) -> None:
        (first_name, first), *others = scorers.items()
        for name, scorer in others:
            _check_fit(first_name, first, name, scorer)
        self.scorer: Any = first
        self._interpolation = interpolation
        self._states = [
            {name: tensor.clone() for name, tensor in scorer.state_dict().items()} for scorer in scorers.values()
        ]
        self._group_of = {name: _group_of(name, first.encoder.num_layers) for name in self._states[0]}
        found = set(self._group_of.values())
        layers = [f"layer {number}" for number in range(1, first.encoder.num_layers + 1)]
        self.groups = [name for name in (OUTSIDE, *layers) if name in found]

    def at(self, shares: Shares) -> Scorer:
        """Return the first scorer with merged weights. Each weight is merged with the shares of its group."""
        merged = {}
        for name, tensor in self._states[0].items():
            tensors, parts = [state[name] for state in self._states], shares[self._group_of[name]]
            if not tensor.is_floating_point():
                merged[name] = tensor
            elif self._interpolation == "slerp":
                merged[name] = slerp(tensors[0], tensors[1], parts[1])
            else:
                merged[name] = linear(tensors, parts)
        self.scorer.load_state_dict(merged)
        scorer: Scorer = self.scorer
        return scorer


def search_shares(
    groups: Sequence[str], trials: Sequence[Sequence[float]], value: Callable[[Shares], float], per_layer: bool
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Search for the shares with the highest value.

    The first trials use equal shares for all groups. With `per_layer`, the groups are then changed one by one, from the
    last group to the first. Among shares of equal value the first is kept, and trials begin with the most equal shares.

    Args:
        groups: Names of the groups.
        trials: Shares to try.
        value: Function that returns the value of shares; higher is better.
        per_layer: Whether groups may have different shares.

    Returns:
        The best shares of each group, and all trials, each with `group` (None: all groups), `shares` and `value`.
    """
    done: list[dict[str, Any]] = []

    def tried(shares: dict[str, list[float]], group: str | None, parts: list[float]) -> float:
        done.append({"group": group, "shares": parts, "value": value(shares)})
        return float(done[-1]["value"])

    ordered = sorted((list(parts) for parts in trials), key=lambda parts: sum(part * part for part in parts))
    best, highest = {}, float("-inf")
    for parts in ordered:
        shares = dict.fromkeys(groups, parts)
        if (reached := tried(shares, None, parts)) > highest + 1e-12:
            best, highest = shares, reached
    for group in reversed(groups) if per_layer else ():
        start = best
        for parts in ordered:
            if parts != start[group] and (reached := tried({**start, group: parts}, group, parts)) > highest + 1e-12:
                best, highest = {**start, group: parts}, reached
    return best, done


def _group_of(name: str, layers: int) -> str:
    """Return the group of a weight; weights of the head, such as `pooler.0`, are `outside`."""
    number = layer_of(name, layers) if ".model." in name else None
    return OUTSIDE if number is None else f"layer {number + 1}"


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape, in float64. Tensors that are all equal are returned unchanged.

    Args:
        tensors: The tensors.
        shares: Weight of each tensor; they sum to 1.
    """
    first = tensors[0].double()
    moved = sum(share * (tensor.double() - first) for share, tensor in zip(shares, tensors, strict=True))
    return (first + moved).to(tensors[0].dtype)


def slerp(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the point at `share` of the arc from one tensor to another. Both are flattened; computed in float64.

    With angle a between the vectors: (sin((1 - share) a) one + sin(share a) other) / sin(a). This is undefined for
    parallel vectors and zero vectors, which get their weighted mean instead.

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
    """Refuse a scorer whose architecture or vocabulary differs from the first scorer's."""
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
    mine, theirs = scoring_options(one), scoring_options(other)
    different = next((key for key in mine if mine[key] != theirs[key]), None)
    if different is not None:
        raise ConfigError(
            f"runs: expected models with one {different}, got {mine[different]} in {first_name} and "
            f"{theirs[different]} in {name}"
        )
    if one.encoder.tokenizer.get_vocab() != other.encoder.tokenizer.get_vocab():
        raise ConfigError(f"runs: expected models of one vocabulary, got different ones in {first_name} and {name}")


def _shape(shapes: Mapping[str, tuple[int, ...]], key: str) -> str:
    return " x ".join(map(str, shapes[key])) if key in shapes else "none"
