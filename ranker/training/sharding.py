"""`trainer.strategy=fsdp`: weights, gradients and optimizer states in shards over the devices (torch's FSDP2).

Each transformer layer is a unit, and the rest of the scorer is another one. In an optimizer step, the weights of a unit
are gathered once, at the first micro-batch, and are kept until the last backward pass, which also sums the gradients,
once. Checkpoints are whole, in the format of a training on one device, so that any number of devices resumes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ranker.errors import ConfigError
from ranker.training.checkpoint_files import link
from ranker.training.checkpoint_shards import NEW, as_part, mapped, part_of


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2: one gather and one reduction a step, checkpoints in this program's format.

    Args:
        parts: Whether each device writes its part of a checkpoint; else the first one writes all.
        options: Options of `ModelParallelStrategy`.

    Attributes:
        never_idle: Every device runs a pass in each step, since all take part in gathers and reductions.
    """

    never_idle = True

    def __init__(self, parts: bool = False, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)
        self.parts = parts

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size = self.world_size

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep weights gathered and gradients unreduced after backward passes in this context."""
        root = self._root
        _set_sync(root, False)
        try:
            yield
        finally:
            _set_sync(root, True)

    def gather_no_more(self) -> None:
        """Drop gathered weights, as after a validation, in which no backward pass does it."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _root(self) -> Any:
        module: Any = self.lightning_module
        return module.scorer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on the CPU of the first device; empty on the others, which take part.

        With `parts`, each device returns its shards, still as such.
        """
        assert self.lightning_module is not None
        weights: dict[str, Any] = self.lightning_module.state_dict()
        return weights if self.parts else _whole(weights, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of the optimizer, as one without shards has it; see `lightning_module_state_dict`."""
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        if self.parts:
            return state
        values = {number: _whole(of_weight, keep=self.is_global_zero) for number, of_weight in state["state"].items()}
        return {"state": values, "param_groups": state["param_groups"]} if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint's file on the first device, or each device's part."""
        if not self.parts:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(str(filepath)))
        sharded: list[str] = []

        def local(name: str, value: Any) -> Any:
            if isinstance(value, DTensor):
                sharded.append(name)
                value = value.to_local()
            return value.detach().cpu().clone()  # a shard is a view of a larger tensor, which would be written whole

        content = as_part(mapped(checkpoint, local), self.global_rank, self.world_size, sharded)
        mine = part_of(path, self.global_rank)
        self.checkpoint_io.save_checkpoint(content, mine.with_name(mine.name + NEW))
        self.barrier()
        if self.is_global_zero:  # from here on, either this checkpoint or the one before is whole
            if storage_options is not None and path.is_file():
                link(path, storage_options["previous"])
            for number in reversed(range(self.world_size)):
                part = part_of(path, number)
                part.with_name(part.name + NEW).replace(part)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint on every device, and keep this device's shards of weights and optimizer states."""
        path = Path(self.broadcast(str(checkpoint_path)))
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(path)
        assert self.lightning_module is not None
        module = self.lightning_module
        weights = module.state_dict()
        stored = checkpoint["state_dict"]
        module.load_state_dict({name: _part(value, weights.get(name)) for name, value in stored.items()}, strict=True)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            owners = [weight for group in optimizer.param_groups for weight in group["params"]]
            values = {
                number: {key: _part(value, owners[int(number)]) for key, value in of_weight.items()}
                for number, of_weight in state["state"].items()
            }
            optimizer.load_state_dict({"state": values, "param_groups": state["param_groups"]})
        return checkpoint


def shard(module: Any, mesh: Any, half: torch.dtype | None) -> None:
    """Shard a training's scorer over the devices: each transformer layer by itself, then the rest.

    Args:
        module: The Lightning module.
        mesh: The devices.
        half: Precision in which a layer's weights are gathered and multiplied; None: their own. Norms, embeddings and
            states between layers stay in their precision.

    Raises:
        ConfigError: The loss has trained weights, which would be the same on all devices, without their sum.
    """
    if isinstance(module.loss, nn.Module) and any(weight.requires_grad for weight in module.loss.parameters()):
        raise ConfigError("loss: expected one without trained weights with trainer.strategy=fsdp, got loss.affine=true")
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
    layers = [part for part in module.scorer.modules() if isinstance(part, GradientCheckpointingLayer)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module.scorer, mesh=mesh, reshard_after_forward=False)


def is_sharded(strategy: Any) -> bool:
    """Whether a trainer's strategy shards the weights."""
    return isinstance(strategy, ShardedStrategy)


def whole_tensor(value: Any) -> Any:
    """Return a value that is the same on all devices: a sharded tensor as a whole; a collective then."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _set_sync(root: FSDPModule, sync: bool) -> None:
    root.set_requires_gradient_sync(sync)
    root.set_reshard_after_backward(sync)
    root.set_is_last_backward(sync)


def _whole(values: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Gather each sharded value in turn; the result is on the CPU if it is kept, else empty."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        whole = whole_tensor(value)
        if keep:
            kept[name] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
    return kept


def _part(value: Any, owner: Any) -> Any:
    """Return this device's part of a value that belongs to a weight; values without its shape stay as they are."""
    if not isinstance(value, Tensor) or not isinstance(owner, DTensor) or value.shape != owner.shape:
        return value
    # every device has read the whole value, so nothing has to be sent
    return distribute_tensor(value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)
