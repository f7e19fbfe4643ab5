"""Build Lightning's Trainer and Fabric from the configuration, and prepare the other processes that they start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from ranker.assembly.precision import checked_precision
from ranker.assembly.run import cfg_values
from ranker.config.roots import CONF
from ranker.config.trainer import FSDP
from ranker.config.writing import inside
from ranker.errors import ConfigError
from ranker.processes import announce_parent, available_cores, is_first_process
from ranker.training import dashboards, loggers
from ranker.training.checkpoint_files import WholeFiles
from ranker.training.progress import ProgressBar
from ranker.training.sharding import ShardedStrategy

PROCESSES_PER_CORE = 4


def build_trainer(
    cfg: DictConfig,
    folder: Path,
    callbacks: list[pl.Callback],
    logger: DictConfig | None = None,
    command: str = "train",
) -> pl.Trainer:
    """Return Lightning's Trainer.

    Args:
        cfg: The configuration.
        folder: The run folder, to which loggers and callbacks write.
        callbacks: Callbacks to use in addition to those of the configuration.
        logger: The `logger` node; None logs nothing.
        command: Name of the running command, which the other processes must run as well.
    """
    options = trainer_options(cfg)
    if options["enable_progress_bar"]:
        callbacks = [*callbacks, ProgressBar(leave=True, refresh_rate=10 if torch.cuda.is_available() else 1)]
    callbacks = [*callbacks, *(instantiate(inside(folder, node)) for node in (cfg.get("callbacks") or {}).values())]
    opened: list[Any] = []
    if logger is not None and not logger.get("none"):
        opened = [loggers.csv(folder)]
        if "_target_" in logger:
            opened.append(instantiate(logger)(folder, Path(cfg.checkpoint) if cfg.get("resume") else None))
    if opened and is_first_process():
        dashboards.start(opened, cfg_values(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    _prepare_children(folder, command)
    # SLURM's requeueing would restart the training from the beginning in a new folder; docs/resume.md has a job script
    # that resumes
    plugins: list[Any] = [WholeFiles(), *([SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else [])]
    with refused_by_lightning("trainer"):
        return pl.Trainer(
            **options, callbacks=callbacks, logger=opened or False, default_root_dir=folder, plugins=plugins
        )


def trainer_options(cfg: DictConfig) -> dict[str, Any]:
    """Return the Trainer's arguments.

    Raises:
        ConfigError: The device does not have the precision, or there are many more processes than CPU cores.
    """
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer)  # type: ignore[assignment]
    _check_cores(options)
    # the Lightning module splits a step into micro-batches and clips gradients itself, so Lightning must do neither
    for key in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
        options.pop(key)
    options["precision"] = checked_precision(options)
    if options["strategy"] == FSDP:  # weights that FSDP gathers in inference mode could not be trained afterwards
        options["inference_mode"] = False
    options["strategy"] = _strategy(options, bool(cfg.get("sharded_checkpoints")))
    return options


def build_fabric(cfg: DictConfig, folder: Path, command: str) -> Fabric:
    """Return the Fabric of an evaluation or a search, with its devices and precision; start the run's other processes.

    Args:
        cfg: The configuration.
        folder: The run folder.
        command: Name of the running command, which the other processes must run as well.
    """
    _prepare_children(folder, command)
    with refused_by_lightning("trainer"):
        fabric = Fabric(**fabric_options(cfg))
    fabric.launch()
    return fabric


def fabric_options(cfg: DictConfig) -> dict[str, Any]:
    """Return Fabric's arguments.

    Raises:
        ConfigError: The device does not have the precision, or there are many more processes than CPU cores.
    """
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer)  # type: ignore[assignment]
    _check_cores(options)
    return {
        **{key: options[key] for key in ("accelerator", "devices", "num_nodes")},
        "precision": checked_precision(options),
        "strategy": "auto" if options["strategy"] == "auto" else "ddp",
    }


@contextlib.contextmanager
def refused_by_lightning(key: str) -> Iterator[None]:
    """Turn an error of a Lightning constructor into one line that names a configuration key.

    Raises:
        ConfigError: Lightning refuses a value.
    """
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, AssertionError, RuntimeError) as error:
        got = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{key}: expected values that Lightning accepts, got Lightning's error: {got}") from error


def several_devices(options: Mapping[str, Any]) -> bool:
    """Return whether Lightning's arguments select more than one device."""
    devices = options["devices"]
    all_gpus = devices in ("auto", -1, "-1") and options["accelerator"] != "cpu" and torch.cuda.device_count() > 1
    counted = (isinstance(devices, int) and devices > 1) or (
        isinstance(devices, str) and ("," in devices or (devices.isdigit() and int(devices) > 1))
    )
    return (
        options["num_nodes"] > 1
        or all_gpus
        or counted
        or (isinstance(devices, (list, ListConfig)) and len(devices) > 1)
    )


def _check_cores(options: Mapping[str, Any]) -> None:
    """Refuse a number of processes that the CPU cores of this machine can't run at a useful speed."""
    on_cpu = options["accelerator"] == "cpu" or (options["accelerator"] == "auto" and not torch.cuda.is_available())
    most = PROCESSES_PER_CORE * available_cores()
    devices = str(options["devices"])
    if on_cpu and devices.isdigit() and int(devices) > most:
        raise ConfigError(
            f"trainer.devices: expected at most {most} processes on the {available_cores()} CPU cores of this machine, "
            f"got {devices}; each of them holds a copy of the model"
        )


def _strategy(options: Mapping[str, Any], parts: bool) -> Strategy | str:
    """Return DDP or FSDP with the options that the training step needs; on one device, Lightning's default strategy.

    Args:
        options: The Trainer's arguments.
        parts: For FSDP: whether each device writes its own part of a checkpoint.
    """
    if not several_devices(options):
        return "auto"
    if options["strategy"] == FSDP:
        return ShardedStrategy(parts, timeout=timedelta(minutes=30))
    return DDPStrategy(
        find_unused_parameters=options["strategy"] == "ddp_find_unused_parameters_true",
        broadcast_buffers=False,  # buffers do not change in training, so this saves one broadcast in each step
        gradient_as_bucket_view=True,
        timeout=timedelta(minutes=30),
    )


def _prepare_children(folder: Path, command: str) -> None:
    """Make Lightning start its other processes with the composed configuration instead of this command line.

    With this command line, a Hydra multirun would start as a whole in each child process. The `${now:...}` resolver
    would also give each child another run folder.
    """
    if HydraConfig.initialized() and is_first_process():
        composed: Any = HydraConfig.instance().cfg
        with read_write(composed.hydra):
            # Lightning passes `hydra.run.dir` to its child processes, but in a multirun Hydra does not set it to the
            # job's folder
            composed.hydra.run.dir = str(folder)
        announce_parent()
        overrides = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/callbacks=sweep"]
        # a script such as train.py runs one command; `ranker` needs the command's name as its first argument
        name = [] if Path(sys.argv[0]).name == f"{command}.py" else [command]
        places = ["--config-path", str(folder), "--config-name", "config", "--config-dir", str(CONF)]
        sys.argv = [sys.argv[0], *name, *places, *overrides]
