"""`trainer.strategy=fsdp`: each device stores a shard of weights, gradients and optimizer states (torch's FSDP2).

Each transformer layer is a unit, and the rest of the scorer is another unit. In an optimizer step, the weights of a
unit are gathered once, at the first micro-batch, and kept until the last backward pass. That pass sums the gradients
over the devices. Checkpoints have the same format as on one device, so that any number of devices can resume them.
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
    """Lightning's strategy for FSDP2, with one gather and one reduction per step, and checkpoints in our format.

    Args:
        parts: Whether each device writes its part of a checkpoint; if not, the first device writes all of it.
        options: Options of `ModelParallelStrategy`.

    Attributes:
        never_idle: True: every device runs a pass in each step, because all must take part in gathers and all-reduces.
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
        """In this context, keep weights gathered after a backward pass, and do not sum gradients over devices."""
        root = self._root
        _set_sync(root, False)
        try:
            yield
        finally:
            _set_sync(root, True)

    def gather_no_more(self) -> None:
        """Free the gathered weights, for example after a validation, which has no backward pass that frees them."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _root(self) -> Any:
        module: Any = self.lightning_module
        return module.scorer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights, in CPU memory, on the first device, and an empty dict on the others.

        All devices must call this method. With `parts`, each device returns its own shards.
        """
        assert self.lightning_module is not None
        weights: dict[str, Any] = self.lightning_module.state_dict()
        return weights if self.parts else _whole(weights, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state, whole or in shards; see `lightning_module_state_dict`."""
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        if self.parts:
            return state
        values = {number: _whole(of_weight, keep=self.is_global_zero) for number, of_weight in state["state"].items()}
        return {"state": values, "param_groups": state["param_groups"]} if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: one file by the first device, or with `parts` one file by each device."""
        if not self.parts:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(str(filepath)))
        sharded: list[str] = []

        def local(name: str, value: Any) -> Any:
            if isinstance(value, DTensor):
                sharded.append(name)
                value = value.to_local()
            return value.detach().cpu().clone()  # without the copy, torch.save would write all memory behind a view

        content = as_part(mapped(checkpoint, local), self.global_rank, self.world_size, sharded)
        mine = part_of(path, self.global_rank)
        self.checkpoint_io.save_checkpoint(content, mine.with_name(mine.name + NEW))
        self.barrier()
        if self.is_global_zero:  # from here on, at least one of this checkpoint and the one before is complete
            if storage_options is not None and path.is_file():
                link(path, storage_options["previous"])
            for number in reversed(range(self.world_size)):
                part = part_of(path, number)
                part.with_name(part.name + NEW).replace(part)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a whole checkpoint on every device, and keep only this device's shards."""
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
    """Shard a training's scorer over the devices: each transformer layer is a unit, and the rest is another unit.

    Args:
        module: The Lightning module.
        mesh: The devices.
        half: Type to which the weights of transformer layers are converted when they are gathered; None: their own
            type. The rest of the scorer, and the states between layers, keep their types.

    Raises:
        ConfigError: The loss has trained weights, which are not sharded, so their gradients would not be summed over
            the devices.
    """
    if isinstance(module.loss, nn.Module) and any(weight.requires_grad for weight in module.loss.parameters()):
        raise ConfigError("loss: expected one without trained weights with trainer.strategy=fsdp, got loss.affine=true")
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
    layers = [part for part in module.scorer.modules() if isinstance(part, GradientCheckpointingLayer)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module.scorer, mesh=mesh, reshard_after_forward=False)


def is_sharded(strategy: Any) -> bool:
    """Return whether a trainer's strategy shards the weights."""
    return isinstance(strategy, ShardedStrategy)


def whole_tensor(value: Any) -> Any:
    """Return the whole tensor of a sharded tensor, or any other value unchanged. All devices must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _set_sync(root: FSDPModule, sync: bool) -> None:
    root.set_requires_gradient_sync(sync)
    root.set_reshard_after_backward(sync)
    root.set_is_last_backward(sync)


def _whole(values: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the sharded values one by one; return whole values in CPU memory if `keep`, else an empty dict."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        whole = whole_tensor(value)
        if keep:
            kept[name] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
    return kept


def _part(value: Any, owner: Any) -> Any:
    """Return this device's shard of a tensor that has the shape of the weight `owner`; other values are unchanged."""
    if not isinstance(value, Tensor) or not isinstance(owner, DTensor) or value.shape != owner.shape:
        return value
    # src_data_rank=None: every device has read the whole tensor, so nothing needs to be sent
    return distribute_tensor(value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)
