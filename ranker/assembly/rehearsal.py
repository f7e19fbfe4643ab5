"""Find wrong options early: build the objects that need no data before data is loaded; check the training's length."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ranker.assembly.scorer import build_loss, build_optimizer, epoch_steps, has_penalties, training_module
from ranker.assembly.trainer import fabric_options, refused_by_lightning, trainer_options
from ranker.data.collection import Splits
from ranker.errors import ConfigError, RankerError

log = logging.getLogger(__name__)


def rehearse_trainer(cfg: DictConfig) -> None:
    """Build Lightning's Trainer with the run's options and callbacks, and discard it.

    Raises:
        ConfigError: Lightning refuses a device, an option or a callback.
    """
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    with refused_by_lightning("trainer"):
        pl.Trainer(
            **{**trainer_options(cfg), **quiet},
            callbacks=[instantiate(node) for node in (cfg.get("callbacks") or {}).values()],
        )


def rehearse_fabric(cfg: DictConfig) -> None:
    """Build Fabric with the devices and precision of an evaluation or search, and discard it.

    Raises:
        ConfigError: Lightning refuses the devices or the precision.
    """
    with refused_by_lightning("trainer"):
        Fabric(**fabric_options(cfg))


def rehearse_training(cfg: DictConfig) -> None:
    """Build the Trainer, an optimizer (for one weight) and the loss, call the schedule once, and discard all of them.

    Raises:
        ConfigError: One of these classes refuses a value.
    """
    if has_penalties(cfg):
        training_module(cfg)
    rehearse_optimization(cfg)
    with _refused("loss"):
        build_loss(cfg)


def rehearse_optimization(cfg: DictConfig) -> None:
    """Build the Trainer and an optimizer (for one weight), call the schedule once, and discard all of them.

    Raises:
        ConfigError: One of these classes refuses a value.
    """
    rehearse_trainer(cfg)
    with _refused("optim"):
        build_optimizer(cfg)([torch.nn.Parameter(torch.zeros(1))])
    with _refused("schedule"):
        float(instantiate(cfg.schedule)(step=1, total=2))


@contextmanager
def _refused(group: str) -> Iterator[None]:
    try:
        yield
    except RankerError:
        raise
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        RuntimeError,
    ) as error:
        if isinstance(error.__cause__, RankerError):
            raise
        got = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{group}: expected values that its class accepts, got its error: {got}") from error


def check_length(cfg: DictConfig, splits: Splits, steps_per_epoch: int) -> None:
    """Check that the training has at least one step, and that validation comes at least once an epoch.

    Args:
        cfg: The configuration.
        splits: The data.
        steps_per_epoch: Optimizer steps of an epoch if `trainer.limit_train_batches` does not shorten it.

    Raises:
        ConfigError: The training would have no step, or Lightning would refuse it.
    """
    steps = check_steps(cfg, steps_per_epoch)
    interval = cfg.trainer.val_check_interval
    if (
        isinstance(interval, int)
        and interval > steps
        and cfg.trainer.check_val_every_n_epoch is not None
        and splits.has_validation
    ):
        raise ConfigError(
            f"trainer.val_check_interval: expected at most {steps}, the steps of an epoch, got {interval}; "
            "lower it, or set trainer.check_val_every_n_epoch=null to count steps over epochs"
        )
    if not splits.has_validation:
        _check_without_validation(cfg)
    monitored = {"monitor": cfg.monitor} | {
        f"callbacks.{name}.monitor": node.get("monitor") for name, node in (cfg.get("callbacks") or {}).items()
    }
    for name in (name for name, part in splits.sets.items() if part.val is None):
        for key, value in monitored.items():
            if str(value).startswith(f"val/{name}/"):
                raise ConfigError(
                    f"{key}: expected a set with validation queries, got {value!r}, but {name} has none; name its "
                    "validation data, or monitor the mean over the sets, such as val/nDCG@10"
                )


def check_steps(cfg: DictConfig, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of an epoch, at most `trainer.limit_train_batches`.

    Raises:
        ConfigError: The number is 0.
    """
    steps = epoch_steps(cfg, steps_per_epoch)
    if steps == 0:
        raise ConfigError(
            f"trainer.limit_train_batches: expected at least one of the {steps_per_epoch} steps of an epoch, "
            f"got {cfg.trainer.limit_train_batches}, which gives 0 steps; raise it"
        )
    return steps


def _check_without_validation(cfg: DictConfig) -> None:
    for name, node in (cfg.get("callbacks") or {}).items():
        monitor: Any = node.get("monitor") if isinstance(node, DictConfig) else None
        if str(monitor).startswith("val/"):
            raise ConfigError(
                f"callbacks.{name}.monitor: expected a validation set for {monitor}, got data without one; "
                "leave the callback out, or name validation data"
            )
    if cfg.monitor is not None:
        log.warning(
            "monitor: the data has no validation set, so there is no best checkpoint; "
            "the last state is tested and exported"
        )


@contextmanager
def refused_in_fit() -> Iterator[None]:
    """Report in one line the wrong options that Lightning and its callbacks find only when the training starts.

    Raises:
        ConfigError: Lightning or a callback refuses a value.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise ConfigError(
            f"trainer: expected values that Lightning accepts, got its error: {' '.join(str(error).split())}"
        ) from error
    except RuntimeError as error:
        if not str(error).startswith("Early stopping conditioned on metric"):
            raise
        raise ConfigError(
            f"callbacks: expected a monitor that is logged, got Lightning's error: {' '.join(str(error).split())}"
        ) from error
