"""Find out whether an attention module of transformers computes what `rotary_heads` does.

The module runs once on random states. Constants stand in for the outputs of its linear layers, and a function that
keeps its arguments stands in for attention. These arguments are compared with the results of `rotary_heads`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ranker.encoders.rotary_heads import HeadNorms, rotary_heads

log = logging.getLogger(__name__)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # names of the linear layers in transformers' models
NORMS = ("q_norm", "k_norm")  # names of the norms of heads, in models that have them
OPTIONS = ("dropout", "scaling", "sliding_window", "softcap")  # what a module may tell its attention function
PROBE = "rotary_probe"  # name of the function in the place of attention in transformers' registry
TOKENS, KEY_HEADS = 6, 2  # sizes of the random states
NEAR = 1e-5  # largest relative difference from the module's own values, of which some are computed in float32


class RotarySettings(NamedTuple):
    """Settings of a module that computes what `rotary_heads` does.

    Args:
        epsilon: Epsilon of the norms; None: there are no norms.
        options: Options of the attention function, in training.
    """

    epsilon: float | None
    options: dict[str, Any]


def rotary_settings(module: Any) -> RotarySettings | None:
    """Return the settings of an attention module that computes what `rotary_heads` does; None if it does not."""
    norms = [norm for name in NORMS if (norm := getattr(module, name, None)) is not None]
    dim = getattr(module, "head_dim", None)
    if not isinstance(dim, int) or dim % 2 or not hasattr(module, "config") or [*module.parameters(recurse=False)]:
        return None
    epsilon = None
    if norms:
        epsilon = getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", None))
        if epsilon is None or not all(_has_one_gain(norm, dim) for norm in norms):
            return None
    try:
        options = _probe(module, dim, epsilon)
    except Exception as error:  # a module with other arguments or shapes has another form
        log.debug("encoder: %s keeps its own rotation: %r", type(module).__name__, error)
        return None
    return None if options is None else RotarySettings(epsilon, options)


def _has_one_gain(norm: nn.Module, dim: int) -> bool:
    """Return whether a norm's only parameter is a gain [dim]; sharded gains have another type."""
    parameters = dict(norm.named_parameters())
    gain = parameters.get("weight")
    return len(parameters) == 1 and type(gain) is nn.Parameter and gain.shape == (dim,)


def _probe(module: Any, dim: int, epsilon: float | None) -> dict[str, Any] | None:
    """Run a module with random projections and gains; return the options of its attention if it fits, else None."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    heads, key_heads = KEY_HEADS * int(getattr(module, "num_key_value_groups", 1)), KEY_HEADS
    # small states, too, whose norm depends on epsilon
    scales = torch.logspace(-4, 1, TOKENS, dtype=torch.float64, device="cpu").unsqueeze(1)
    outputs = [random(TOKENS, count * dim) * scales for count in (heads, key_heads, key_heads)]
    states, result, mixed = random(1, TOKENS, 4), random(1, TOKENS, 4), random(1, TOKENS, heads, dim)
    cos, sin, *gains = random(TOKENS, dim), random(TOKENS, dim), random(dim), random(dim)
    linear = [_Fixed(output.unsqueeze(0)) for output in (*outputs, result[0])]
    got: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> tuple[Tensor, None]:
        got.append(((query, key, value), options | {"mask": mask}))
        return mixed, None

    AttentionInterface.register(PROBE, attend)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _replaced(module, linear, gains):
        returned = module(
            hidden_states=states, position_embeddings=(cos.unsqueeze(0), sin.unsqueeze(0)), attention_mask=None
        )
    norms = None if epsilon is None else HeadNorms(gains[0], gains[1], epsilon)
    expected = rotary_heads(torch.cat(outputs, 1), norms, cos, sin, heads, key_heads)
    (parts, options), *more = got
    known = {name: options.pop(name) for name in OPTIONS if name in options}
    mask = options.pop("mask")
    inputs = [layer.inputs for layer in linear]
    if more or any(value is not None for value in (*mask, *options.values())) or returned[0] is not linear[3].output:
        return None
    if any(len(given) != 1 or given[0] is not states for given in inputs[:3]):
        return None
    if len(inputs[3]) != 1 or not torch.equal(inputs[3][0], mixed.flatten(2)):
        return None
    same = all(_same(part[0].transpose(0, 1), own) for part, own in zip(parts, expected, strict=True))
    return known if same else None


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of heads are equal, up to a difference relative to each token's largest value."""
    if one.shape != other.shape:
        return False
    difference, largest = ((part.abs().amax((1, 2))) for part in (one.double() - other, other))
    return bool((difference <= NEAR * largest).all())


class _Fixed(nn.Module):
    """A layer that returns a constant and keeps its inputs."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output
        self.inputs: list[Tensor] = []

    def forward(self, states: Tensor) -> Tensor:
        self.inputs.append(states)
        return self.output


@contextmanager
def _replaced(module: Any, linear: list[_Fixed], gains: list[Tensor]) -> Iterator[None]:
    """Replace a module's linear layers and the gains of its norms, its attention function and its mode for a while."""
    layers = {name: module._modules[name] for name in PROJECTIONS}
    norms = [norm for name in NORMS if (norm := getattr(module, name, None)) is not None]
    weights, training, attention = [norm.weight for norm in norms], module.training, module.config._attn_implementation
    try:
        module._modules.update(zip(PROJECTIONS, linear, strict=True))
        for norm, gain in zip(norms, gains[: len(norms)], strict=True):
            norm._parameters["weight"] = nn.Parameter(gain, requires_grad=False)
        module.training, module.config._attn_implementation = True, PROBE
        yield
    finally:
        module._modules.update(layers)
        for norm, weight in zip(norms, weights, strict=True):
            norm._parameters["weight"] = weight
        module.training, module.config._attn_implementation = training, attention
