"""Linear layers in 8 bits: int8 on a CPU, fp8 on GPUs that support it; and training with the rounding of int8.

Each token of the input, and each output unit of a layer, has its own scale. So the score of a pair does not depend on
the rest of the batch. Embeddings, norms, attention between tokens, and scoring heads keep their precision.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.errors import ConfigError

INT8, FP8 = 127.0, 448.0  # largest value of each type
CHUNK = 256  # rows that are multiplied at a time; their intermediate values then stay in the CPU's cache
ZERO = 128  # what stands for zero in unsigned inputs
KINDS = ("int8", "fp8")


def scales(values: Tensor, largest: float) -> Tensor:
    """Return the largest absolute value of each row divided by `largest`, float32 [..., 1]; 1 for rows of zeros."""
    most = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True)).float()
    return torch.where(most > 0, most / largest, torch.ones_like(most))


class Int8Weight:
    """A linear layer's weight in int8, which `torch.nn.functional.linear` accepts in place of a tensor.

    The inputs are rounded to int8, too. The layer's output is the integer product of both, times the scales of inputs
    and weights. The method is Q8BERT (Zafrir et al., 2019, arXiv:1910.06188) with a scale for each token instead of one
    for all. CPUs with instructions for int8 products (VNNI, AMX) use a second copy of the weight, stored in
    the memory layout that these instructions need. Other CPUs multiply the same whole numbers in float32.

    Args:
        values: The rounded weight divided by its scales, int8 [out, in].
        scale: Scale of each output unit, float32 [out].
        kind: Dtype of the weight before rounding.
    """

    def __init__(self, values: Tensor, scale: Tensor, kind: torch.dtype) -> None:
        self.values, self.scale, self.dtype = values, scale, kind
        self.shape, self.ndim, self.device = values.shape, 2, values.device
        self._joined: tuple[list[Int8Weight], Int8Weight] | None = None

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
        """Return the rounded weight, reshaped as by `Tensor.unflatten`."""
        return self.dequantized().unflatten(*sizes)

    @torch.no_grad()
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return `inputs @ weight.T + bias` in the precision of the inputs."""
        if inputs.device.type != "cpu":
            raise ConfigError(f"inference.quantize: expected null or fp8 on {inputs.device.type}, got int8")
        rows = inputs.reshape(-1, inputs.shape[-1])
        found = torch.empty(len(rows), len(self.scale), dtype=inputs.dtype)
        whole = torch.empty(min(len(rows), CHUNK), rows.shape[-1], dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            for some, into in zip(rows.split(CHUNK), found.split(CHUNK), strict=True):
                factors = scales(some, INT8)
                product = self._product(torch.mul(some, factors.reciprocal(), out=whole[: len(some)]).round_())
                if bias is None:
                    torch.mul(product, factors, out=into)
                else:
                    torch.addcmul(bias, product, factors, out=into)
        return found.view(*inputs.shape[:-1], len(self.scale))

    def joined(self, others: list[Int8Weight]) -> Int8Weight:
        """Return this weight with the rows of others below its own rows. Equal arguments give the same object."""
        if self._joined is None or [*map(id, self._joined[0])] != [*map(id, others)]:
            parts = [self, *others]
            values, factors = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
            self._joined = others, Int8Weight(values, factors, self.dtype)
        return self._joined[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the packed copy, which torch can neither copy nor pickle."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}

    def _product(self, whole: Tensor) -> Tensor:
        """Return the product of rounded rows and this weight times the weight's scales, float32 [rows, out].

        Args:
            whole: Whole numbers from -127 to 127, float32 [rows, in].
        """
        # without VNNI, oneDNN's sums of int8 may overflow
        if not (torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()):
            return (whole @ self.values.t().float()).mul_(self.scale)
        # VNNI multiplies unsigned inputs; oneDNN's product of signed ones takes seconds where AMX is missing. Inverting
        # the first bit of an int8 adds 128; torch converts float32 to uint8 much more slowly than to int8.
        unsigned = whole.to(torch.int8).view(torch.uint8).bitwise_xor_(ZERO)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, ZERO, self._packed, self.scale, self._zeros, None, 1.0, 0,
            torch.float32, "none", [], "",
        )  # fmt: skip
        return product

    @cached_property
    def _packed(self) -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(self.values, None)
        return packed

    @cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.scale), dtype=torch.int32)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Implement `functional.linear` and `torch.cat`, the two functions that layers call with a weight."""
        options = options or {}
        if function is functional.linear:
            inputs, weight, *rest = arguments
            return weight.multiply(inputs, rest[0] if rest else options.get("bias"))
        if function is torch.cat:
            first, *others = arguments[0]
            return first.joined(others)
        raise NotImplementedError(f"{function} on a weight in int8")


class QuantizationAware(nn.Linear):
    """A linear layer that rounds weights and inputs to int8 as `Int8Weight` does, with straight-through gradients.

    `aware` changes the class of a model's linear layers to this one. Weights, names and files do not change.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product of rounded inputs and rounded weights."""
        return functional.linear(rounded(inputs), rounded(self.weight), self.bias)


def rounded(values: Tensor) -> Tensor:
    """Return values [..., in] rounded to int8 row by row. The gradient ignores the rounding (Bengio et al., 2013)."""
    factors = scales(values.detach(), INT8)
    near = ((values.detach().float() / factors).round() * factors).to(values.dtype)
    return values + (near - values).detach()


class Fp8Linear(nn.Module):
    """A linear layer that multiplies in fp8 (e4m3), with a scale for each token and for each output unit.

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
        """Return the output, in bfloat16 on a GPU. A CPU has no fp8 product, so there it has the inputs' dtype."""
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
        """Move to a device. Fp8 weights ignore a change of dtype, for example by Lightning's precision plugins."""
        weight, scale = self.weight, self.scale
        super()._apply(function, recurse)
        self.weight, self.scale = weight.to(self.weight.device), scale.to(self.scale.device)
        return self


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return each linear layer of a model as (parent module, name in the parent, layer)."""
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
    """Replace the weights of a model's linear layers by int8 weights. int8 weights can't be trained or stored."""
    for _, _, linear in linear_layers(model):
        weight = Int8Weight.of(linear.weight)
        linear.__class__ = nn.Linear
        del linear.weight
        linear.weight = weight  # type: ignore[assignment]
        # the state dict gets the values, so that its hash tells a quantized model's vectors from the original's
        linear.register_buffer("int8", weight.values)
        linear.register_buffer("int8_scale", weight.scale)


def fp8_unavailable(device: torch.device) -> str:
    """Return why a device has no fp8 product; empty if it has one."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 9.0"
    return ""


def to_fp8(model: nn.Module) -> None:
    """Replace the linear layers of a model by fp8 ones.

    Raises:
        ConfigError: The size of a layer is not a multiple of 16.
    """
    for parent, name, linear in linear_layers(model):
        if linear.in_features % 16 or linear.out_features % 16:
            raise ConfigError(
                f"inference.quantize: expected layers whose sizes are multiples of 16 for fp8, got {name} of "
                f"{linear.in_features} x {linear.out_features}"
            )
        setattr(parent, name, Fp8Linear(linear))
