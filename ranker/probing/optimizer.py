"""One optimiser and one dropout for many probes, each of which gets what it would get by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Dropout:
    """Masks of independent members: each has a generator of its own, so that it gets the same masks in any company.

    Args:
        keys: Seed of each member's generator.
        rate: Share of hidden units to drop.
        shape: Most targets of a batch, and hidden units.
        device: Where the masks are needed.
    """

    def __init__(self, keys: Sequence[int], rate: float, shape: tuple[int, int], device: torch.device) -> None:
        self._keys, self._step = list(keys), 0
        self._generators = [torch.Generator(device).manual_seed(key) for key in keys]
        self._rate, self._shape, self._device = rate, shape, device
        # several steps at once: a launch a member and step would be most of a GPU's time
        self._steps = max(1, min(64, (1 << 19) // (shape[0] * shape[1])))
        self._kept: Tensor | None = None
        self._used = self._steps

    def __call__(self, targets: int) -> Tensor | None:
        """The next step's factors, 0 or 1 / (1 - rate), [members, targets, hidden]; None without dropout."""
        if self._rate == 0:
            return None
        if self._device.type == "cpu":
            self._step += 1
            return torch.stack([self._draw(key, targets) for key in self._keys])
        if self._used == self._steps:
            drawn = [
                torch.rand(self._steps, *self._shape, generator=own, device=self._device) >= self._rate
                for own in self._generators
            ]
            self._kept, self._used = torch.stack(drawn).float().div_(1 - self._rate), 0
        assert self._kept is not None
        self._used += 1
        return self._kept[:, self._used - 1, :targets]

    def _draw(self, key: int, targets: int) -> Tensor:
        """A member's factors of this step [targets, hidden], no more than are used; more rows would begin with the same ones."""
        drawn = np.random.Generator(np.random.SFC64([key, self._step])).integers(
            0, 1 << 16, (targets, self._shape[1]), dtype=np.uint16
        )
        return torch.from_numpy(drawn >= round(self._rate * (1 << 16))).float().div_(1 - self._rate)

    def keep(self, members: Tensor) -> None:
        """Go on with some members only, int64 [members]."""
        self._keys = [self._keys[i] for i in members.tolist()]
        self._generators = [self._generators[i] for i in members.tolist()]
        self._kept = None if self._kept is None else self._kept[members.to(self._device)]


class Adam:
    """Adam (Kingma and Ba, 2015) on a matrix of members, with each member's own rate and gradient clipping.

    Args:
        parameters: float32 [members, parameters]; changed in place.
        lr: Rate.
        clip: Largest norm of a member's gradient.
    """

    BETAS, EPS = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Tensor, lr: float, clip: float) -> None:
        self.parameters, self.clip = parameters, clip
        self.gradient = torch.zeros_like(parameters)
        self.rates = torch.full((len(parameters), 1), lr, device=parameters.device)
        self._mean, self._square = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = 0

    def step(self) -> None:
        """Clip and update, as torch's clip_grad_norm_ and Adam do for each member by itself; a member of rate 0 stays as it is."""
        self._steps += 1
        norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
        clipped = (self.clip / (norms + 1e-6)).clamp(max=1.0)
        if self.parameters.device.type == "cpu":
            self._step_each(clipped)
        else:
            self._step_all(clipped)

    def _step_all(self, clipped: Tensor) -> None:
        """All members at once: on a GPU the number of launches is what counts."""
        first, second = self.BETAS
        gradient = self.gradient.mul_(clipped)
        mean = self._mean.lerp_(gradient, 1 - first)
        square = self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**self._steps)).add_(self.EPS)
        self.parameters.sub_(mean.div(scale).mul_(self.rates / (1 - first**self._steps)))

    def _step_each(self, clipped: Tensor) -> None:
        """One member after another, by torch's fused kernel: on a CPU reading the numbers once is what counts."""
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
        """Go on with some members only, int64 [members]."""
        self.parameters, self.gradient, self.rates = (
            self.parameters[members],
            self.gradient[members],
            self.rates[members],
        )
        self._mean, self._square = self._mean[members], self._square[members]
