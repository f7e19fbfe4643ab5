"""Adam and dropout for a stack of probes. Each probe (a member of the stack) is trained exactly as if trained alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Dropout:
    """Dropout masks. Each member has its own generator, so that its masks do not depend on other members.

    Args:
        keys: Seed of each member's generator.
        rate: Share of hidden units to drop.
        shape: The maximum number of targets of a batch, and the number of hidden units.
        device: Device of the masks.
    """

    def __init__(self, keys: Sequence[int], rate: float, shape: tuple[int, int], device: torch.device) -> None:
        self._keys, self._step = list(keys), 0
        self._generators = [torch.Generator(device).manual_seed(key) for key in keys]
        self._rate, self._shape, self._device = rate, shape, device
        # A GPU draws the masks of several steps at once, because a kernel launch for each member and step would take
        # most of the time.
        self._steps = max(1, min(64, (1 << 19) // (shape[0] * shape[1])))
        self._drawn: Tensor | None = None
        self._used = self._steps

    def __call__(self, targets: int) -> Tensor | None:
        """Return the next step's factors, 0 or 1 / (1 - rate), float32 [members, targets, hidden]; None for rate 0."""
        if self._rate == 0:
            return None
        if self._device.type == "cpu":
            self._step += 1
            return torch.stack([self._draw(key, targets) for key in self._keys])
        if self._used == self._steps:
            masks = [
                torch.rand(self._steps, *self._shape, generator=generator, device=self._device) >= self._rate
                for generator in self._generators
            ]
            self._drawn, self._used = torch.stack(masks).float().div_(1 - self._rate), 0
        assert self._drawn is not None
        self._used += 1
        return self._drawn[:, self._used - 1, :targets]

    def _draw(self, key: int, targets: int) -> Tensor:
        """Return a member's factors in this step, float32 [targets, hidden]; a row does not depend on `targets`."""
        drawn = np.random.Generator(np.random.SFC64([key, self._step])).integers(
            0, 1 << 16, (targets, self._shape[1]), dtype=np.uint16
        )
        return torch.from_numpy(drawn >= round(self._rate * (1 << 16))).float().div_(1 - self._rate)

    def keep(self, members: Tensor) -> None:
        """Keep only the members with these indices, int64 [members]."""
        self._keys = [self._keys[i] for i in members.tolist()]
        self._generators = [self._generators[i] for i in members.tolist()]
        self._drawn = None if self._drawn is None else self._drawn[members.to(self._device)]


class Adam:
    """Adam (Kingma and Ba, 2015) on a matrix of members, with a learning rate and gradient clipping for each member.

    Args:
        parameters: float32 [members, parameters]; changed in place.
        lr: Learning rate.
        clip: Maximum norm of a member's gradient.
    """

    BETAS, EPS = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Tensor, lr: float, clip: float) -> None:
        self.parameters, self.clip = parameters, clip
        self.gradient = torch.zeros_like(parameters)
        self.rates = torch.full((len(parameters), 1), lr, device=parameters.device)
        self._mean, self._square = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = 0

    def step(self) -> None:
        """Clip and update each member like torch's clip_grad_norm_ and Adam; learning rate 0 changes nothing."""
        self._steps += 1
        norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
        clipped = (self.clip / (norms + 1e-6)).clamp(max=1.0)
        if self.parameters.device.type == "cpu":
            self._step_each(clipped)
        else:
            self._step_all(clipped)

    def _step_all(self, clipped: Tensor) -> None:
        """Update all members at once, because on a GPU kernel launches take most of the time."""
        first, second = self.BETAS
        gradient = self.gradient.mul_(clipped)
        mean = self._mean.lerp_(gradient, 1 - first)
        square = self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**self._steps)).add_(self.EPS)
        self.parameters.sub_(mean.div(scale).mul_(self.rates / (1 - first**self._steps)))

    def _step_each(self, clipped: Tensor) -> None:
        """Update members one by one with torch's fused kernel, because on a CPU memory reads take most of the time."""
        steps = torch.tensor(float(self._steps))
        for member, (rate, factor) in enumerate(
            zip(self.rates.squeeze(1).tolist(), clipped.squeeze(1).tolist(), strict=True)
        ):
            if rate == 0:
                continue
            if factor < 1:
                self.gradient[member].mul_(factor)
            torch._fused_adam_(
                [self.parameters[member]],
                [self.gradient[member]],
                [self._mean[member]],
                [self._square[member]],
                [],
                [steps],
                lr=rate,
                beta1=self.BETAS[0],
                beta2=self.BETAS[1],
                weight_decay=0.0,
                eps=self.EPS,
                amsgrad=False,
                maximize=False,
            )

    def keep(self, members: Tensor) -> None:
        """Keep only the members with these indices, int64 [members]."""
        self.parameters, self.gradient = self.parameters[members], self.gradient[members]
        self.rates = self.rates[members]
        self._mean, self._square = self._mean[members], self._square[members]
