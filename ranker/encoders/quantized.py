"""Linear layers in 8 bits: int8 on a CPU, fp8 on GPUs that multiply it, and int8 imitated in training.

Each token has a scale of its own, so that a pair's score does not depend on the rest of the batch; each output of a
layer has one, too. Embeddings, norms, attention between tokens and heads keep their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.errors import ConfigError

INT8, FP8 = 127.0, 448.0  # largest numbers
KINDS = ("int8", "fp8")


def scales(values: Tensor, largest: float) -> Tensor:
    """Return the factor of each row that makes its largest absolute value `largest`, [..., 1]; 1 for rows of zeros."""
    most = values.abs().amax(-1, keepdim=True).float()
    return torch.where(most > 0, most / largest, torch.ones_like(most))


class Int8Weight:
    """A linear layer's weight in int8, which stands in for the tensor in `torch.nn.functional.linear`.

    A product is the integer product of int8 inputs and weights, times both scales: exact but for the rounding of inputs
    and weights to 8 bits (Q8BERT, Zafrir et al., 2019, arXiv:1910.06188, with scales by token in place of one).

    Args:
        values: int8 [out, in].
        scale: float32 [out].
        kind: Precision of the products' inputs and outputs before.
    """

    def __init__(self, values: Tensor, scale: Tensor, kind: torch.dtype) -> None:
        self.values, self.scale, self.dtype = values, scale, kind
        self.shape, self.ndim, self.device = values.shape, 2, values.device
        self._columns = values.t()

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Round a weight [out, in] to int8."""
        factors = scales(weight.detach(), INT8)
        values = (weight.detach().float() / factors).round().to(torch.int8)
        return cls(values, factors[:, 0].contiguous(), weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the rounded weight, [out, in]."""
        return (self.values.float() * self.scale.unsqueeze(1)).to(self.dtype)

    def unflatten(self, *sizes: Any) -> Tensor:
        """Return the rounded weight as `Tensor.unflatten` does."""
        return self.dequantized().unflatten(*sizes)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return `inputs @ weight.T + bias` in the precision of the inputs."""
        if inputs.device.type != "cpu":
            raise ConfigError(f"inference.quantize: expected null or fp8 on {inputs.device.type}, got int8")
        rows = inputs.reshape(-1, inputs.shape[-1])
        factors = scales(rows, INT8)
        rounded = (rows.float() * factors.reciprocal()).round_().to(torch.int8)
        product = torch._int_mm(rounded, self._columns).float().mul_(factors)
        product = product * self.scale if bias is None else torch.addcmul(bias.float(), product, self.scale)
        return product.to(inputs.dtype).view(*inputs.shape[:-1], len(self.scale))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run the two functions that layers call with a weight."""
        options = options or {}
        if function is functional.linear:
            inputs, weight, *rest = arguments
            return weight.multiply(inputs, rest[0] if rest else options.get("bias"))
        if function is torch.cat:
            (parts,) = arguments
            values, factors = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
            return cls(values, factors, parts[0].dtype)
        raise NotImplementedError(f"{function} on a weight in int8")


class QuantizationAware(nn.Linear):
    """A linear layer that rounds weights and inputs to int8 as `Int8Weight` does, with straight-through gradients.

    `aware` changes the class of the linear layers of a model; their weights, names and files stay.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product of rounded inputs and rounded weights."""
        return functional.linear(rounded(inputs), rounded(self.weight), self.bias)


def rounded(values: Tensor) -> Tensor:
    """Return values [..., in] rounded to int8 by rows; the gradient is that of the values (Bengio et al., 2013)."""
    factors = scales(values.detach(), INT8)
    near = ((values.detach().float() / factors).round() * factors).to(values.dtype)
    return values + (near - values).detach()


class Fp8Linear(nn.Module):
    """A linear layer whose products run in fp8 (e4m3) with a scale for each token and each output.

    Args:
        linear: The layer.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        factors = scales(linear.weight.detach(), FP8)
        self.register_buffer("weight", (linear.weight.detach().float() / factors).to(torch.float8_e4m3fn))
        self.register_buffer("scale", factors.t().contiguous())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product in bfloat16; in the precision of the inputs where no fp8 product runs (a CPU)."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        factors = scales(rows, FP8)
        small = (rows.float() / factors).to(torch.float8_e4m3fn)
        if inputs.device.type == "cuda":
            product = torch._scaled_mm(
                small, self.weight.t(), scale_a=factors, scale_b=self.scale, out_dtype=torch.bfloat16
            )
        else:
            product = ((small.float() @ self.weight.float().t()) * factors * self.scale).to(inputs.dtype)
        product = product if self.bias is None else product + self.bias.to(product.dtype)
        return product.view(*inputs.shape[:-1], self.out_features)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Move to a device; a change of precision, as of Lightning's plug-ins, leaves fp8 as it is."""
        weight, scale = self.weight, self.scale
        super()._apply(function, recurse)
        self.weight, self.scale = weight.to(self.weight.device), scale.to(self.scale.device)
        return self


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers of a transformers model: parent, name in it, and layer."""
    return [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.Linear)
    ]


def aware(model: nn.Module) -> None:
    """Make the linear layers of a model round to int8 in each forward pass."""
    for _, _, linear in linear_layers(model):
        linear.__class__ = QuantizationAware


def to_int8(model: nn.Module) -> None:
    """Replace the weights of a model's linear layers by int8 ones; they can't be trained or stored any more."""
    for _, _, linear in linear_layers(model):
        weight = Int8Weight.of(linear.weight)
        linear.__class__ = nn.Linear
        del linear.weight
        linear.weight = weight  # type: ignore[assignment]
        # in the state, so that stored vectors of a quantised model are not taken for those of another one
        linear.register_buffer("int8", weight.values)
        linear.register_buffer("int8_scale", weight.scale)


def fp8_unavailable(device: torch.device) -> str:
    """Return why no fp8 product runs on a device; empty if one does."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 9.0"
    return ""


def to_fp8(model: nn.Module) -> None:
    """Replace the linear layers of a model by fp8 ones.

    Raises:
        ConfigError: The size of a layer is no multiple of 16.
    """
    for parent, name, linear in linear_layers(model):
        if linear.in_features % 16 or linear.out_features % 16:
            raise ConfigError(
                f"inference.quantize: expected layers whose sizes are multiples of 16 for fp8, got {name} of "
                f"{linear.in_features} x {linear.out_features}"
            )
        setattr(parent, name, Fp8Linear(linear))
