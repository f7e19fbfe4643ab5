"""The edge probe (Tenney et al., ICLR 2019, arXiv:1905.06316), many at a time, in its pool-then-project form.

A probe projects each token of a span, weights the tokens by a learned score of the projection, adds them up, and
classifies the spans' sums. Since the weights of a span sum to 1, projecting the weighted sum of the raw states is the
same function: sum a_n (W h_n + b) = W (sum a_n h_n) + b, and softmax(v.(W h_n + b)) = softmax((W v).h_n). It takes one
projection a span instead of one a token.

Axes of a stack: layers (each reads its own states), seeds (each reads its own batch), columns (label sets that share
states and batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ranker.errors import ConfigError
from ranker.probing.batches import SpanStates

HEADS = ("edge", "mlp2", "linear")


@dataclass(frozen=True)
class EdgeProbe:
    """Shape of a probe; its parameters are one flat vector, so that a stack of probes is one matrix.

    Args:
        dim: Size of a state.
        slots: Spans of a target, 1 or 2.
        classes: Number of classes.
        hidden: Size of a projected span and of the hidden layer.
        dropout: Dropout before the output layer (edge head only).
        head: What reads the spans' sums: `edge` (linear, tanh, layer norm, dropout, linear), `mlp2` (two ReLU layers;
            Hewitt and Liang, EMNLP 2019) or `linear`.
    """

    dim: int
    slots: int
    classes: int
    hidden: int = 256
    dropout: float = 0.3
    head: str = "edge"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ConfigError(f"training.head: expected one of {', '.join(HEADS)}; got {self.head!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, in the order of the flat vector; the output layer is last, so that all before it is the same for any k."""
        hidden, wide = self.hidden, self.slots * self.hidden
        shapes: dict[str, tuple[int, ...]] = {}
        for slot in range(self.slots):
            shapes |= {f"project{slot}": (self.dim, hidden), f"bias{slot}": (hidden,), f"score{slot}": (hidden,)}
        if self.head == "edge":
            shapes |= {"inner": (wide, hidden), "inner_bias": (hidden,), "norm": (hidden,), "norm_bias": (hidden,)}
        elif self.head == "mlp2":
            shapes |= {
                "inner": (wide, hidden),
                "inner_bias": (hidden,),
                "second": (hidden, hidden),
                "second_bias": (hidden,),
            }
        last = wide if self.head == "linear" else hidden
        return shapes | {"out": (last, self.classes), "out_bias": (self.classes,)}

    @property
    def num_parameters(self) -> int:
        """Numbers in the flat vector.

        >>> EdgeProbe(dim=768, slots=2, classes=10).num_parameters
        528650
        """
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int) -> Tensor:
        """Initial parameters, float32 [parameters]: those of torch's linear layers, the same for every layer, subject and control.

        The output layer starts at 0, so that an untrained probe is the uniform code and not a random one that costs
        more.
        """
        generator = torch.Generator().manual_seed(seed)
        parts = []
        fan_in = 1
        for name, shape in self.shapes().items():
            if name.startswith(("norm", "out")):
                parts.append(torch.full(shape, float(name == "norm")))
                continue
            # a bias follows its weight and shares its range
            fan_in = shape[0] if len(shape) == 2 or name.startswith("score") else fan_in
            parts.append((torch.rand(shape, generator=generator) * 2 - 1).div_(math.sqrt(fan_in)))
        return torch.cat([part.flatten() for part in parts])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the flat vectors [..., parameters] by name."""
        views, start = {}, 0
        for name, shape in self.shapes().items():
            size = math.prod(shape)
            views[name] = flat[..., start : start + size].unflatten(-1, shape)
            start += size
        return views

    def logits(
        self, parameters: dict[str, Tensor], spans: Sequence[Sequence[SpanStates]], kept: Tensor | None = None
    ) -> Tensor:
        """Classify targets.

        Args:
            parameters: Views [layers, seeds, columns, ...].
            spans: The states of each slot's spans; each target has at least one token.
            kept: Dropout's factors, 0 or 1 / (1 - rate), [layers, seeds, columns, targets, hidden]; None without
                dropout.

        Returns:
            [layers, seeds, columns, targets, classes]
        """
        names = ("project", "bias", "score")
        sums = [
            _SpanSums.apply(*(parameters[f"{name}{slot}"] for name in names), spans[slot]) for slot in range(self.slots)
        ]
        read = sums[0] if self.slots == 1 else torch.cat(sums, dim=-1)
        if self.head == "edge":
            inner = torch.tanh(_linear(read, parameters["inner"], parameters["inner_bias"]))
            inner = functional.layer_norm(inner, inner.shape[-1:])
            read = inner * parameters["norm"].unsqueeze(-2) + parameters["norm_bias"].unsqueeze(-2)
            if kept is not None:
                read = read * kept
        elif self.head == "mlp2":
            read = torch.relu(_linear(read, parameters["inner"], parameters["inner_bias"]))
            read = torch.relu(_linear(read, parameters["second"], parameters["second_bias"]))
        return _linear(read, parameters["out"], parameters["out_bias"])


class _SpanSums(torch.autograd.Function):
    """Projected weighted sum of each span, with its gradient written out: autograd's would take twice a CPU's time."""

    @staticmethod
    def forward(ctx: Any, project: Tensor, bias: Tensor, score: Tensor, chunks: Sequence[SpanStates]) -> Tensor:
        """Parameters of a slot [layers, seeds, columns, ...] and its spans -> [layers, seeds, columns, targets, hidden]."""
        direction = (project @ score.unsqueeze(-1)).squeeze(-1)  # [layers, seeds, columns, dim]
        kept: list[Tensor] = []
        sums = []
        for chunk in chunks:
            states = chunk.read()  # [layers, seeds, targets, tokens, dim]
            # few rows times many columns: the other way round, a CPU's product takes five times as long
            scores = (
                (direction @ states.flatten(2, 3).transpose(-1, -2)).unflatten(3, states.shape[2:4]).transpose(2, 3)
            )
            weights = scores.masked_fill(~chunk.mask.unsqueeze(-2), -torch.inf).softmax(
                dim=-1
            )  # [layers, seeds, targets, columns, tokens]
            sums.append((weights @ states).transpose(2, 3))
            if ctx.needs_input_grad[0]:
                kept += [states, weights]
        pooled = torch.cat(sums, dim=3)  # [layers, seeds, columns, targets, dim]
        ctx.save_for_backward(project, score, pooled, *kept)
        return _linear(pooled, project, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Through the softmax: d score = weight (d weight - mean of d weight under the weights)."""
        project, score, pooled, *kept = ctx.saved_tensors
        above = (gradient @ project.transpose(-1, -2)).transpose(2, 3)  # [layers, seeds, targets, columns, dim]
        turned = torch.zeros_like(pooled[:, :, :, 0])  # of the direction [layers, seeds, columns, dim]
        first = 0
        for states, weights in zip(kept[::2], kept[1::2], strict=True):
            slopes = above[:, :, first : first + states.shape[2]] @ states.transpose(-1, -2)
            slopes = weights * (slopes - (weights * slopes).sum(dim=-1, keepdim=True))
            turned += slopes.transpose(2, 3).flatten(3, 4) @ states.flatten(2, 3)
            first += states.shape[2]
        # the score's part of the projection's gradient as one more target: one product, and no matrix to add
        wide, high = torch.cat([pooled, turned.unsqueeze(3)], dim=3), torch.cat([gradient, score.unsqueeze(3)], dim=3)
        return wide.transpose(-1, -2) @ high, gradient.sum(dim=3), (turned.unsqueeze(3) @ project).squeeze(3), None


def _linear(read: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[layers, seeds, columns, targets, in] -> [..., out], each member with its own weight [in, out]."""
    shape = read.shape[:-1]
    made = torch.baddbmm(
        bias.reshape(-1, 1, bias.shape[-1]), read.reshape(-1, *read.shape[-2:]), weight.reshape(-1, *weight.shape[-2:])
    )
    return made.view(*shape, -1)
