"""A stack of edge probes (Tenney et al., ICLR 2019, arXiv:1905.06316), which pool before they project.

A published probe projects each token of a span, weights the projections by learned scores, adds them up, and classifies
the sums of the spans. The weights a_n of a span sum to 1. So a projection of the weighted sum of the states is the same
function: sum a_n (W h_n + b) = W (sum a_n h_n) + b, and softmax(v.(W h_n + b)) = softmax((W v).h_n). This takes one
projection per span, not one per token.

A stack has three axes: layers, which read different states; seeds, which read different batches; and label sets, which
read the same states and batches. A member is one probe of the stack.
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
    """Shape of a probe. The parameters of a probe are one flat vector, so that a stack of probes is one matrix.

    Args:
        dim: Size of a state.
        slots: Number of spans of a target, 1 or 2.
        classes: Number of classes.
        hidden: Size of a projected span and of the hidden layer.
        dropout: Dropout rate before the output layer; only the edge head has dropout.
        head: Classifier of the spans' sums: `edge` (linear, tanh, layer norm, dropout, linear), `mlp2` (two ReLU
            layers; Hewitt and Liang, EMNLP 2019) or `linear`.

    Raises:
        ConfigError: An unknown head.
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
        """Return the shape of each parameter, in the order of the flat vector.

        The output layer is last, so that the parameters before it do not depend on the number of classes.
        """
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
        """Size of the flat vector.

        >>> EdgeProbe(dim=768, slots=2, classes=10).num_parameters
        528650
        """
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int) -> Tensor:
        """Return the initial parameters, float32 [parameters], which are the same for every layer, subject and control.

        Parameters are drawn as in torch's linear layers, except that the output layer starts at 0. So an untrained
        probe gives the uniform code; a random output layer would give a longer code.
        """
        generator = torch.Generator().manual_seed(seed)
        parts = []
        fan_in = 1
        for name, shape in self.shapes().items():
            if name.startswith(("norm", "out")):
                parts.append(torch.full(shape, float(name == "norm")))
                continue
            # a bias follows its weight and is drawn from the same range
            fan_in = shape[0] if len(shape) == 2 or name.startswith("score") else fan_in
            parts.append((torch.rand(shape, generator=generator) * 2 - 1).div_(math.sqrt(fan_in)))
        return torch.cat([part.flatten() for part in parts])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the flat vectors [..., parameters] by name."""
        views, start = {}, 0
        for name, shape in self.shapes().items():
            size = math.prod(shape)
            views[name] = flat[..., start : start + size].unflatten(-1, shape)
            start += size
        return views

    def logits(
        self, parameters: dict[str, Tensor], spans: Sequence[Sequence[SpanStates]], dropout_mask: Tensor | None = None
    ) -> Tensor:
        """Classify targets.

        Args:
            parameters: Views by name, [layers, seeds, label sets, ...].
            spans: Chunks of spans for each slot; each span has at least one token.
            dropout_mask: Factors 0 or 1 / (1 - rate), [layers, seeds, label sets, targets, hidden]; None: no dropout.

        Returns:
            Logits, [layers, seeds, label sets, targets, classes].
        """
        names = ("project", "bias", "score")
        sums = [
            _SpanSums.apply(*(parameters[f"{name}{slot}"] for name in names), spans[slot]) for slot in range(self.slots)
        ]
        features = sums[0] if self.slots == 1 else torch.cat(sums, dim=-1)
        if self.head == "edge":
            inner = torch.tanh(_linear(features, parameters["inner"], parameters["inner_bias"]))
            inner = functional.layer_norm(inner, inner.shape[-1:])
            features = inner * parameters["norm"].unsqueeze(-2) + parameters["norm_bias"].unsqueeze(-2)
            if dropout_mask is not None:
                features = features * dropout_mask
        elif self.head == "mlp2":
            features = torch.relu(_linear(features, parameters["inner"], parameters["inner_bias"]))
            features = torch.relu(_linear(features, parameters["second"], parameters["second_bias"]))
        return _linear(features, parameters["out"], parameters["out_bias"])


class _SpanSums(torch.autograd.Function):
    """Projected weighted sum of each span. The handwritten backward pass takes half the CPU time of autograd."""

    @staticmethod
    def forward(ctx: Any, project: Tensor, bias: Tensor, score: Tensor, chunks: Sequence[SpanStates]) -> Tensor:
        """Pool and project the spans of one slot.

        Args:
            ctx: Saves tensors for `backward`.
            project: [layers, seeds, label sets, dim, hidden]
            bias: [layers, seeds, label sets, hidden]
            score: [layers, seeds, label sets, hidden]
            chunks: The spans.

        Returns:
            [layers, seeds, label sets, targets, hidden]
        """
        direction = (project @ score.unsqueeze(-1)).squeeze(-1)  # W v [layers, seeds, label sets, dim]
        saved: list[Tensor] = []
        sums = []
        for chunk in chunks:
            states = chunk.read()  # [layers, seeds, targets, tokens, dim]
            # few rows times many columns: on a CPU, the transposed product takes five times as long
            scores = direction @ states.flatten(2, 3).transpose(-1, -2)
            scores = scores.unflatten(3, states.shape[2:4]).transpose(2, 3)
            # [layers, seeds, targets, label sets, tokens]
            weights = scores.masked_fill(~chunk.mask.unsqueeze(-2), -torch.inf).softmax(dim=-1)
            sums.append((weights @ states).transpose(2, 3))
            if ctx.needs_input_grad[0]:
                saved += [states, weights]
        pooled = torch.cat(sums, dim=3)  # [layers, seeds, label sets, targets, dim]
        ctx.save_for_backward(project, score, pooled, *saved)
        return _linear(pooled, project, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of project, bias and score, with the shapes in `forward`.

        The gradient of the softmax is d score = weight (d weight - mean of d weight, weighted by the weights).
        """
        project, score, pooled, *saved = ctx.saved_tensors
        # [layers, seeds, targets, label sets, dim]
        pooled_gradient = (gradient @ project.transpose(-1, -2)).transpose(2, 3)
        direction_gradient = torch.zeros_like(pooled[:, :, :, 0])  # [layers, seeds, label sets, dim]
        first = 0
        for states, weights in zip(saved[::2], saved[1::2], strict=True):
            slopes = pooled_gradient[:, :, first : first + states.shape[2]] @ states.transpose(-1, -2)
            slopes = weights * (slopes - (weights * slopes).sum(dim=-1, keepdim=True))
            direction_gradient += slopes.transpose(2, 3).flatten(3, 4) @ states.flatten(2, 3)
            first += states.shape[2]
        # The gradient of the projection has a second part, from the score. This part is appended as a further target,
        # so that one product gives the sum of both parts.
        column = direction_gradient.unsqueeze(3)
        left, right = torch.cat([pooled, column], dim=3), torch.cat([gradient, score.unsqueeze(3)], dim=3)
        return left.transpose(-1, -2) @ right, gradient.sum(dim=3), (column @ project).squeeze(3), None


def _linear(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map [layers, seeds, label sets, targets, in] to [..., out]; each member has its own weight [in, out]."""
    shape = features.shape[:-1]
    outputs = torch.baddbmm(
        bias.reshape(-1, 1, bias.shape[-1]),
        features.reshape(-1, *features.shape[-2:]),
        weight.reshape(-1, *weight.shape[-2:]),
    )
    return outputs.view(*shape, -1)
