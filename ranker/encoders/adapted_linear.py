"""Compute linear layers with adapters as one matrix product, on CUDA in half precision.

y = W x + s B A x equals [W, s B] [x, A x]. So the adapter adds `rank` columns to the product with the frozen weight.
Separate products would read and write all outputs once more. In the backward pass, one product with [W, s B] gives the
gradients of x (through W) and of A x. Layers that read the same states (query, key and value; gate and up) are stacked:
one product computes A x for all these layers, and another product computes their outputs.

This works only if the adapters' inputs have no dropout, because with dropout each layer reads different states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

COLUMNS = 16  # ranks are filled with zeros up to a multiple of this, so that rows begin at multiples of 32 bytes


@custom_op("ranker::adapted_linear", mutates_args=())
def adapted_linear(
    states: Tensor, firsts: list[Tensor], seconds: list[Tensor], scales: list[float],  # noqa: ARG001
    bias: Tensor | None, first: Tensor, wide: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs of stacked layers.

    Args:
        states: [tokens, inputs].
        firsts: Matrix A of each layer, [rank, inputs]; it gets a gradient, but its values are read from `first`.
        seconds: Matrix B of each layer, [outputs, rank]; it gets a gradient, but its values are read from `wide`.
        scales: Factor of B A of each layer.
        bias: Biases of all layers, concatenated; they are frozen.
        first: Matrices A of all layers, concatenated, then rows of zeros, [columns, inputs], in the precision of the
            states.
        wide: Frozen weights W of all layers, concatenated. To their right, each layer's scale times B, in the columns
            of the layer's A. [outputs, inputs + columns], in the precision of the states.

    Returns:
        The outputs, [tokens, outputs of all layers], and a tensor for the backward pass: A x, [tokens, columns], or the
        states and A x, [tokens, inputs + columns].
    """
    inputs = states.shape[1]
    if not _keeps_states(wide, inputs):
        low = states @ first.T
        result = functional.linear(states, wide[:, :inputs], bias)
        return result.addmm_(low, wide[:, inputs:].T), low
    kept = torch.cat([states, states @ first.T], 1)  # twice as fast as copies into the parts of a tensor
    return functional.linear(kept, wide, bias), kept


def _keeps_states(wide: Tensor, inputs: int) -> bool:
    """Return whether to copy the states next to A x: if there are more outputs than inputs, a copy costs less."""
    return wide.shape[0] > inputs


@adapted_linear.register_fake
def _(states: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    first, wide = others[-2:]
    columns = wide.shape[1] if _keeps_states(wide, states.shape[1]) else first.shape[0]
    return states.new_empty(states.shape[0], wide.shape[0]), states.new_empty(states.shape[0], columns)


@custom_op("ranker::adapted_linear_backward", mutates_args=())
def adapted_linear_backward(
    grad: Tensor, states: Tensor | None, kept: Tensor, first: Tensor, wide: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of states [tokens, inputs], of all A [columns, inputs] and of all B [outputs, columns].

    Args:
        grad: Gradient of the outputs, [tokens, outputs].
        states: The states; None if they are in `kept`.
        kept: The second result of `adapted_linear`.
        first: See `adapted_linear`.
        wide: See `adapted_linear`.
    """
    inputs = first.shape[1]
    whole = grad @ wide
    low = whole[:, inputs:]
    grad_first = low.T @ (kept[:, :inputs] if states is None else states)
    grad_second = grad.T @ (kept[:, inputs:] if states is None else kept)
    return whole[:, :inputs].addmm_(low, first), grad_first, grad_second


@adapted_linear_backward.register_fake
def _(
    grad: Tensor, states: Tensor | None, kept: Tensor, first: Tensor, wide: Tensor  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    columns, inputs = first.shape
    return (
        grad.new_empty_strided((grad.shape[0], inputs), (wide.shape[1], 1)),
        grad.new_empty(columns, inputs),
        grad.new_empty(wide.shape[0], columns),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    states, firsts, seconds, ctx.scales, _, first, wide = inputs
    ctx.shapes = [second.shape for second in seconds]
    ctx.dtypes = firsts[0].dtype, seconds[0].dtype
    separate = None if _keeps_states(wide, states.shape[1]) else states
    ctx.save_for_backward(separate, output[1], first, wide)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    grad_states, grad_first, grad_second = adapted_linear_backward(grad.contiguous(), *ctx.saved_tensors)
    firsts, seconds, row, column = [], [], 0, 0
    for scale, (outputs, rank) in zip(ctx.scales, ctx.shapes, strict=True):
        firsts.append(grad_first[column : column + rank].to(ctx.dtypes[0]))
        part = grad_second[row : row + outputs, column : column + rank]
        seconds.append(part.to(ctx.dtypes[1]) * scale)
        row, column = row + outputs, column + rank
    return grad_states, firsts, seconds, None, None, None, None


adapted_linear.register_autograd(_backward, setup_context=_keep)


class Siblings:
    """Layers with adapters that read the same states, with their stacked weights.

    The layer that is called first computes the outputs of all layers; the others return their parts.

    Args:
        layers: peft's linear layers, in the order of their calls.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.wide: Tensor | None = None
        self.first: Tensor | None = None
        self.bias: Tensor | None = None
        self._base: list[tuple[int, int]] = []
        self._states: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stacked weights, because copies stack their own weights."""
        state = self.__dict__ | dict.fromkeys(("wide", "first", "bias", "_states"))
        return {**state, "_base": [], "_outputs": ()}

    def output(self, number: int, states: Tensor) -> Tensor:
        """Return the output [..., outputs] of the layer with index `number` for states [..., inputs].

        `refresh` must have been called before.
        """
        if number == 0 or self._states is not states:
            whole = self.whole(states)
            if len(self.layers) == 1:
                return whole
            sizes = [layer.out_features for layer in self.layers]
            self._states, self._outputs = states, whole.split(sizes, dim=-1)
        result = self._outputs[number]
        if number == len(self.layers) - 1:
            self._states, self._outputs = None, ()
        return result

    def whole(self, states: Tensor) -> Tensor:
        """Return the outputs of all layers end to end, [..., outputs of all], for states [..., inputs]."""
        assert self.wide is not None and self.first is not None
        pairs = [adapter_of(layer) for layer in self.layers]
        flat = states.reshape(-1, states.shape[-1]).to(self.wide.dtype)
        outputs, _ = adapted_linear(
            flat, [pair[0] for pair in pairs], [pair[1] for pair in pairs], [pair[2] for pair in pairs], self.bias,
            self.first, self.wide,
        )  # fmt: skip
        return outputs.view(*states.shape[:-1], outputs.shape[-1])

    @torch.inference_mode(False)  # training can't use weights that were stacked in inference mode
    @torch.no_grad()
    def refresh(self, dtype: torch.dtype) -> None:
        """Stack the weights in a precision, or copy the adapters' current values into weights that are stacked already.

        Frozen weights that have this precision become views of the stacked weights, so they are in memory only once.
        """
        bases = [layer.get_base_layer() for layer in self.layers]
        pairs = [adapter_of(layer) for layer in self.layers]
        inputs, columns = bases[0].in_features, sum(pair[0].shape[0] for pair in pairs)
        if self.wide is None or self.wide.dtype != dtype or self._base != [_identity(base.weight) for base in bases]:
            weight = bases[0].weight
            width = inputs + -(-columns // COLUMNS) * COLUMNS
            rows = sum(base.out_features for base in bases)
            self.wide = torch.zeros(rows, width, dtype=dtype, device=weight.device)
            self.first = torch.zeros(width - inputs, inputs, dtype=dtype, device=weight.device)
            for base, part in zip(bases, self.wide.split([base.out_features for base in bases]), strict=True):
                part[:, :inputs].copy_(base.weight)
                if base.weight.dtype == dtype:
                    base.weight.data = part[:, :inputs]
            self._base = [_identity(base.weight) for base in bases]
            self.bias = None
            if bases[0].bias is not None:
                self.bias = torch.cat([base.bias for base in bases]).to(dtype)
        assert self.first is not None
        row, column = 0, 0
        # assigned through `data`, so that a backward pass can still use the tensors; the frozen values do not change
        wide, stacked = self.wide.data, self.first.data
        for base, (first, second, scale) in zip(bases, pairs, strict=True):
            rank = first.shape[0]
            stacked[column : column + rank].copy_(first)
            place = wide[row : row + base.out_features, inputs + column : inputs + column + rank]
            place.copy_(second * scale if scale != 1 else second)
            row, column = row + base.out_features, column + rank


def _identity(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def adapter_of(layer: Any) -> tuple[Tensor, Tensor, float]:
    """Return A, B and the factor of B A of a linear layer of peft."""
    name = layer.active_adapters[0]
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def group_siblings(layers: list[Any], run: Callable[[], Any]) -> None:
    """Find the layers that read the same states; give each layer its `Siblings` and its index among them.

    Args:
        layers: peft's linear layers.
        run: Runs the model on one row.
    """
    calls: list[tuple[Tensor, Any]] = []

    def record(layer: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        calls.append((inputs[0], layer))

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[Any]] = []
    before: Tensor | None = None
    for states, layer in calls:
        if any(layer in group for group in groups):  # ALBERT calls a layer several times
            continue
        if states is before and _stack(groups[-1][0], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = states
    for group in groups:
        siblings = Siblings(group)
        for number, layer in enumerate(group):
            layer.siblings, layer.place = siblings, number


def _stack(one: Any, other: Any) -> bool:
    """Return whether the weights of two layers can be stacked."""
    bases = one.get_base_layer(), other.get_base_layer()
    same = {(type(base), base.weight.dtype, base.bias is None) for base in bases}
    return len(same) == 1
