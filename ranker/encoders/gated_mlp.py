"""Gated feed-forward layers, down(silu(gate(x)) * up(x)), whose gate and up are computed together (`adapted_linear`).

One matrix product computes the outputs of gate and up as one tensor [tokens, 2 * dim]. One kernel reads this tensor and
computes silu(gates) * values. In the backward pass, one kernel writes the gradient of the whole tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

try:  # Triton comes with torch's CUDA builds
    from ranker.encoders.kernels import gated_activation as kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

PARTS = ("gate_proj", "up_proj", "down_proj")  # names of the three linear layers in transformers' models


@custom_op("ranker::gated_silu", mutates_args=())
def gated_silu(x: Tensor) -> Tensor:
    """Return silu(gates) * values, [tokens, dim], for gates and values side by side, [tokens, 2 * dim]."""
    if kernels is not None and x.is_cuda:
        return kernels.gated(x, "silu")
    gates, values = x.chunk(2, 1)
    return functional.silu(gates) * values


@gated_silu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@custom_op("ranker::gated_silu_backward", mutates_args=())
def gated_silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `gated_silu`, [tokens, 2 * dim], from the gradient of its output, [tokens, dim]."""
    if kernels is not None and x.is_cuda:
        return kernels.gated_backward(grad, x, "silu")
    gates, values = x.chunk(2, 1)
    share = gates.sigmoid()
    return torch.cat([grad * values * share * (1 + gates * (1 - share)), grad * gates * share], 1)


@gated_silu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return gated_silu_backward(grad, *ctx.saved_tensors)


gated_silu.register_autograd(_backward, setup_context=_keep)


def use_gated_kernel(model: nn.Module) -> int:
    """Let a model's gated feed-forward layers use `gated_silu` in passes with stacked weights; return how many do so.

    A module is such a layer if three conditions hold: it contains layers with the names `PARTS`, its gate and up are
    stacked together, and it computes down(silu(gate(x)) * up(x)) for random x.
    """
    found = 0
    module: Any
    for module in list(model.modules()):
        if _is_gated(module):
            kind: Any = type(module)
            module.__class__ = _gated_class(kind)
            found += 1
    return found


def _is_gated(module: Any) -> bool:
    parts: list[Any] = [getattr(module, name, None) for name in PARTS]
    gate, up, down = parts
    siblings = getattr(gate, "siblings", None)
    if siblings is None or down is None or siblings.layers != [gate, up] or isinstance(module, Gated):
        return False
    weight = gate.get_base_layer().weight
    if type(weight) is not nn.Parameter:  # sharded or quantized weights never run stacked
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    states = torch.randn(1, 4, weight.shape[1], generator=generator, device="cpu").to(weight.device, weight.dtype)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        expected = module(states)
        return torch.equal(down(functional.silu(gate(states)) * up(states)), expected)


class Gated:
    """Forward pass of a gated feed-forward layer of transformers, which uses `gated_silu` where it can."""

    packing: Any
    gate_proj: Any
    down_proj: Any

    def forward(self, states: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)) for states x, [..., dim]."""
        current = self.packing.current
        if current is None or not current.stacked:
            result: Tensor = super().forward(states)  # type: ignore[misc]
            return result
        wide = self.gate_proj.siblings.whole(states)
        mixed = gated_silu(wide.view(-1, wide.shape[-1]))
        output: Tensor = self.down_proj(mixed.view(*wide.shape[:-1], -1))
        return output


@cache
def _gated_class(base: type) -> type:
    return type(base.__name__, (Gated, base), {})
