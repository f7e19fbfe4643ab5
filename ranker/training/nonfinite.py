"""Store a training step whose loss or gradient is NaN or infinite, so that the step can be repeated.

The files are safetensors and JSON, which contain no code.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ranker.errors import CheckpointError, NonFinite
from ranker.files.checksums import verify_folder, write_sums
from ranker.training.run_writer import write_json
from ranker.types import Movable, TrainStep

log = logging.getLogger(__name__)

DUMP_KEYS = ("step", "epoch", "index", "loss", "grad_norm", "query_ids", "devices", "precision")  # keys of dump.json
MAX_DUMPS = 3  # for each run: a dump contains all weights, and if many steps are skipped, the first few are enough


class PendingStep:
    """A step whose loss and gradient norm may still be on their way to the host.

    Args:
        step: This device's part of the step.
        number: Number of optimizer steps before this one.
        summary: Three values of the whole step: loss, gradient norm and number of requests to stop [3]. On a GPU, the
            constructor starts to copy them to the host and does not wait.
    """

    def __init__(self, step: TrainStep, number: int, summary: Tensor) -> None:
        self.step, self.number = step, number
        self._arrived = torch.cuda.Event() if summary.is_cuda else None
        self._summary = (
            torch.empty(summary.shape, dtype=summary.dtype, pin_memory=True).copy_(summary, non_blocking=True)
            if self._arrived
            else summary
        )
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> Tensor:
        """Return loss, gradient norm and number of requests to stop [3] on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._summary


def report(module: Any, step: TrainStep, number: int, loss: float, norm: float) -> None:
    """Write a step whose loss or gradient is NaN or infinite to a folder; then log the skipped step, or stop training.

    Args:
        module: The RerankModule.
        step: This device's part of the step.
        number: Number of optimizer steps before this one.
        loss: The step's loss.
        norm: The step's gradient norm.

    Raises:
        NonFinite: `nonfinite.action` is `stop`.
    """
    loader: Any = module.trainer.train_dataloader
    ids = loader.query_ids(step.epoch, step.index) if hasattr(loader, "query_ids") else []
    dump = write_dump(module, step, number, loss, norm, ids) if module.nonfinite.folder is not None else None
    text = (
        f"training: expected a finite loss and gradient, got loss {loss} and gradient norm {norm} at step {number} "
        f"(epoch {step.epoch}, step {step.index} of this epoch), "
        f"queries {', '.join(ids[:8])}{' ...' if len(ids) > 8 else ''}"
    )
    if dump is not None:
        text += f"; python -m ranker replay {dump} repeats it"
    if module.nonfinite.action != "skip":
        message = f"{text}; lower optim.lr, look at these queries, or set nonfinite=skip"
        raise NonFinite(message if module.trainer.is_global_zero else "", loss, norm)
    if module.trainer.is_global_zero:
        log.warning("%s; skipped", text)


def write_dump(
    module: Any, step: TrainStep, number: int, loss: float, norm: float, query_ids: list[str]
) -> Path | None:
    """Write the weights before the step, and each device's part of the step. All processes must call this.

    Args:
        module: The RerankModule, with its trainer and a folder in `nonfinite`.
        step: This device's part of the step.
        number: Number of optimizer steps before this one.
        loss: The step's loss.
        norm: The step's gradient norm.
        query_ids: The step's queries.

    Returns:
        The folder; None if there are already `MAX_DUMPS`, or the step could not be written because the disk is full.
    """
    trainer, dumps = module.trainer, module.nonfinite.folder
    enough = len(list(dumps.glob("step-*"))) >= MAX_DUMPS
    # only the first process knows the run folder
    dumps_path = trainer.strategy.broadcast(None if enough else str(dumps), src=0)
    if dumps_path is None:
        return None
    folder = Path(dumps_path) / f"step-{number}"
    partial = folder.with_name(f".{folder.name}.partial")
    seeds = tuple(module.micro_batch_seed(step, i) for i in range(len(step.micro_batches)))
    fault = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _save_step(partial / f"device-{trainer.global_rank}", replace(step, seeds=seeds))
        if trainer.is_global_zero:
            save_file(
                {name: value.detach().cpu().clone() for name, value in module.state_dict().items()},
                partial / "weights.safetensors",
            )
            shutil.copyfile(dumps.parent / "config.yaml", partial / "config.yaml")
            write_json(partial / "dump.json", {
                "step": number, "epoch": step.epoch, "index": step.index, "loss": str(loss), "grad_norm": str(norm),
                "query_ids": query_ids, "devices": trainer.world_size, "precision": trainer.precision,
            })  # fmt: skip
    except (OSError, SafetensorError) as error:  # no error, because the caller reports that the step is not finite
        fault = error
        log.warning("%s: the step can't be written (%s)", partial, error)
    if not trainer.strategy.reduce_boolean_decision(fault is None):
        return None
    if trainer.is_global_zero:
        write_sums(partial)
        partial.replace(folder)
    return folder


def read_dump(folder: Path) -> tuple[TrainStep, dict[str, Tensor], dict[str, Any]]:
    """Read a dump; return the step, merged for a single device, the weights before it, and the dump's `dump.json`.

    Raises:
        CheckpointError: The folder is not a dump, or is damaged.
    """
    try:
        verify_folder(folder, error=CheckpointError)
        about = json.loads((folder / "dump.json").read_text(encoding="utf-8"))
        parts = [_load_step(folder / f"device-{device}") for device in range(about["devices"])]
        weights = load_file(folder / "weights.safetensors")
        if not all(isinstance(part, TrainStep) for part in parts) or not parts or not set(DUMP_KEYS) <= set(about):
            raise ValueError(f"no step, or a dump.json that lacks one of {', '.join(DUMP_KEYS)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: expected the folder of a stored training step (RUN/nonfinite/step-N), got {error!r}"
        ) from error
    micro_batches = tuple(batch for part in parts for batch in part.micro_batches)
    return (
        replace(parts[0], micro_batches=micro_batches, seeds=tuple(seed for part in parts for seed in part.seeds)),
        weights,
        about,
    )


def _save_step(stem: Path, step: TrainStep) -> None:
    tensors: dict[str, Tensor] = {}
    write_json(stem.with_suffix(".json"), _take_apart(step, "step", tensors))
    save_file(tensors or {"none": torch.zeros(0)}, stem.with_suffix(".safetensors"))


def _load_step(stem: Path) -> TrainStep:
    return _put_together(
        json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")), load_file(stem.with_suffix(".safetensors"))
    )


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON: a batch to its fields, a tensor to its name in `tensors`, where it is stored."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone()
        return {"tensor": name}
    if isinstance(value, Movable):
        batch_type = type(value)
        content = {
            field.name: _take_apart(getattr(value, field.name), f"{name}.{field.name}", tensors)
            for field in fields(value)  # type: ignore[arg-type]
        }
        return {"type": f"{batch_type.__module__}.{batch_type.__name__}", "fields": content}
    if isinstance(value, tuple):
        return [_take_apart(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
    return value


def _put_together(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `_take_apart`. Only batch types of this program are accepted."""
    if isinstance(node, list):
        return tuple(_put_together(part, tensors) for part in node)
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    module, _, name = str(node["type"]).rpartition(".")
    batch_type = (
        getattr(importlib.import_module(module), name, None)
        if module in ("ranker.types", "ranker.multitask.steps")
        else None
    )
    if not (isinstance(batch_type, type) and issubclass(batch_type, Movable)):
        raise ValueError(f"no batch type: {node['type']}")
    return batch_type(**{key: _put_together(value, tensors) for key, value in node["fields"].items()})
