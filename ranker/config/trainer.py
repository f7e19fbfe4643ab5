"""Check `trainer` for values that Lightning would ignore silently, or refuse only after the data is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeGuard

from omegaconf import DictConfig, OmegaConf

from ranker.config import sharding
from ranker.data.parsing import shown

PRECISIONS = (None, "16-mixed", "bf16-mixed", "32-true", "64-true", "bf16-true", 32, 64, "32", "64", "bf16")
FSDP = "fsdp"
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", FSDP)
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
PROFILERS = (None, "simple", "advanced", "pytorch")
# Variables that show how processes on several machines were started: by torchrun, SLURM, LSF, MPI, or by hand.
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR")


def faults_of(cfg: DictConfig) -> list[str]:
    """Return one fault for each unusable value of `trainer`."""
    node = cfg.get("trainer")
    if node is None:
        return []
    trainer: Any = OmegaConf.to_container(node, resolve=True)
    faults = [*_hardware(trainer), *_unsupported(trainer), *_validation(trainer)]
    if trainer.get("strategy") == FSDP:
        faults += sharding.faults_of(cfg)
    if "optim" in cfg:
        faults += _length(trainer)
    return [f"trainer.{fault}" for fault in faults]


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hardware(trainer: Mapping[str, Any]) -> list[str]:
    faults = []
    if trainer.get("accelerator") not in ACCELERATORS:
        faults.append(f"accelerator: expected one of {', '.join(ACCELERATORS)}; got {trainer.get('accelerator')!r}")
    if not _are_devices(trainer.get("devices")):
        faults.append(
            "devices: expected a number above 0 (or -1 for all), a list of indices or auto; "
            f"got {shown(trainer.get('devices'))}"
        )
    if not _is_in(trainer.get("precision"), PRECISIONS):
        faults.append(
            f"precision: expected one of bf16-mixed, 32-true, 64-true, bf16-true; got {shown(trainer.get('precision'))}"
        )
    if trainer.get("precision") == "16-mixed":
        faults.append(
            "precision: 16-mixed is refused, since gradients would be clipped before they are unscaled; use bf16-mixed"
        )
    if trainer.get("strategy") not in STRATEGIES:
        faults.append(f"strategy: expected one of {', '.join(STRATEGIES)}; got {trainer.get('strategy')!r}")
    nodes: Any = trainer.get("num_nodes")
    if _is_int(nodes) and nodes > 1 and not any(name in os.environ for name in LAUNCHERS):
        faults.append(
            "num_nodes: expected torchrun, SLURM or MASTER_ADDR and NODE_RANK in the environment, "
            f"through which {nodes} machines meet, got none; start the training so, or set trainer.num_nodes=1"
        )
    if not _is_in(trainer.get("deterministic"), (None, True, False, "warn")):
        faults.append(f"deterministic: expected true, false, warn or null; got {shown(trainer.get('deterministic'))}")
    if trainer.get("profiler") not in PROFILERS:
        faults.append(f"profiler: expected one of {', '.join(PROFILERS[1:])} or null; got {trainer.get('profiler')!r}")
    return faults


def _is_in(value: Any, known: tuple[Any, ...]) -> bool:
    """Return whether a value equals a known value of the same type; 1 does not count as true."""
    return any(type(value) is type(other) and value == other for other in known)


def _are_devices(devices: Any) -> bool:
    if isinstance(devices, str):
        if devices in ("auto", "-1"):
            return True
        parts = devices.removesuffix(",").split(",")
        return all(part.strip().isdecimal() for part in parts) and len(set(parts)) == len(parts) and devices != "0"
    if isinstance(devices, list):
        return (
            bool(devices)
            and all(_is_int(device) and device >= 0 for device in devices)
            and len(set(devices)) == len(devices)
        )
    return _is_int(devices) and (devices == -1 or 0 < devices < 2**31)


def _unsupported(trainer: Mapping[str, Any]) -> list[str]:
    """Return one fault for each argument with which the results would contradict the files in the run folder."""
    faults = [
        f"{key}: not supported, since an evaluation needs every query exactly once; leave it unset"
        for key in ("fast_dev_run", "barebones", "use_distributed_sampler")
        if trainer.get(key)
    ]
    faults += [
        f"{key}: not supported, since an evaluation needs every query exactly once; leave it unset"
        for key in ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
        if trainer.get(key) is not None
    ]
    if trainer.get("enable_checkpointing") is False:
        faults.append("enable_checkpointing: expected true, since the best state is what is tested and exported")
    if trainer.get("overfit_batches"):
        faults.append(
            "overfit_batches: not supported with one item per optimizer step; use trainer.limit_train_batches"
        )
    if trainer.get("gradient_clip_algorithm") not in (None, "norm"):
        faults.append(f"gradient_clip_algorithm: expected norm, got {trainer.get('gradient_clip_algorithm')!r}")
    if trainer.get("reload_dataloaders_every_n_epochs"):
        faults.append(
            "reload_dataloaders_every_n_epochs: not supported, since all epochs read the same data; set it to 0"
        )
    if trainer.get("model_registry") is not None:
        faults.append("model_registry: not supported, since a run keeps its model in its own folder; leave it unset")
    return faults


def _validation(trainer: Mapping[str, Any]) -> list[str]:
    interval, epochs = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
    if interval is None:
        if epochs is not None:
            return []
        return [
            "val_check_interval: expected a number of steps beside trainer.check_val_every_n_epoch=null, got null; "
            "set a number, as 1000"
        ]
    steps, share = _is_int(interval) and 1 <= interval < 2**31, isinstance(interval, float) and 0 < interval <= 1
    if not steps and not share:
        return [
            "val_check_interval: expected a number of steps or a share of an epoch above 0 and up to 1.0, "
            f"got {shown(interval)}"
        ]
    if share and epochs is None:
        return [
            "val_check_interval: expected a number of steps beside trainer.check_val_every_n_epoch=null, "
            f"got the share {interval}"
        ]
    return []


def _length(trainer: Mapping[str, Any]) -> list[str]:
    """Check that a training ends, and that it has at least one step; 0 differs from an unset value."""
    faults = []
    for key in ("max_epochs", "max_steps"):
        if trainer.get(key) == 0:
            faults.append(
                f"{key}: expected at least 1, got 0, which trains nothing; evaluate.py measures a model as it is"
            )
    epochs: Any = trainer.get("max_epochs")
    steps: Any = trainer.get("max_steps")
    if (epochs is None or epochs < 0) and (steps is None or steps < 0):
        faults.append(
            "max_epochs: expected trainer.max_epochs or trainer.max_steps, got neither; the schedule needs an end"
        )
    if epochs is not None and 0 <= epochs < (trainer.get("min_epochs") or 0):
        faults.append(f"min_epochs: expected at most trainer.max_epochs={epochs}, got {trainer.get('min_epochs')}")
    limit = trainer.get("limit_train_batches")
    whole, share = _is_int(limit) and 1 <= limit < 2**31, isinstance(limit, float) and 0 < limit <= 1
    if limit is not None and not whole and not share:
        faults.append(
            "limit_train_batches: expected a number of steps from 1 or a share of an epoch above 0 and up to 1.0, "
            f"got {shown(limit)}"
        )
    if trainer.get("max_time") is not None and not _is_time(trainer["max_time"]):
        faults.append(
            "max_time: expected days:hours:minutes:seconds above 0, as 00:12:00:00, or {hours: 12}; "
            f"got {shown(trainer['max_time'])}"
        )
    return faults


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        parts = re.fullmatch(r"(\d{1,5}):(\d{1,2}):(\d{1,2}):(\d{1,2})", value.strip())
        return parts is not None and any(int(part) for part in parts.groups())
    units = ("days", "hours", "minutes", "seconds", "weeks")
    if (
        not isinstance(value, dict)
        or not value
        or not all(key in units and _is_number(number) for key, number in value.items())
    ):
        return False
    try:
        return timedelta(**value) > timedelta(0)
    except (OverflowError, ValueError):
        return False
