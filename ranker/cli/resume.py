"""Decide which keys keep their stored value when a training continues a run or starts from a stored model."""

from __future__ import annotations

import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ranker.config.stored import load_stored
from ranker.config.targets import training_keys
from ranker.errors import ConfigError

# Keys that a resumed run may override, with all keys below them. They set how long and where the training runs, and
# what it stores and shows. A change of any other key would give a different training.
CHANGEABLE = (
    "trainer",
    "batch.max_tokens",
    "batch.eval_max_tokens",
    "batch.workers",
    "encoder.trust_remote_code",
    "callbacks",
    "logger",
    "report",
    "name",
    "cache_dir",
    "save_every_steps",
    "sharded_checkpoints",
    "nonfinite",
    "checkpoint",
    "resume",
)
# Exceptions to `trainer` above. These may not be overridden: the node as a whole, and keys that change the training.
FIXED = ("trainer", "trainer.limit_train_batches", "trainer.gradient_clip_val")


def task_overrides() -> list[str]:
    """Return the overrides on the command line, except those of `hydra.*`."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def overrides_of(key: str) -> list[str]:
    """Return the overrides on the command line that set a key or a key below it."""
    return [override for override in task_overrides() if re.match(rf"\+{{0,2}}{key}[.=]", override)]


def run_name(name: str, checkpoint: str | None, resume: bool) -> str:
    """Return the name of a run; a run that resumes another keeps that run's name, unless an override sets it."""
    stored = Path(checkpoint or "") / "config.yaml"
    if not resume or overrides_of("name") or not stored.is_file():
        return name
    return str(OmegaConf.select(load_stored(stored), "name") or name)


def started_from(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the stored model and encoder of `checkpoint`.

    Of the model and the encoder, the command line may override only keys that affect nothing but the training
    (`training_keys`).

    Raises:
        ConfigError: The checkpoint does not come from a training, or the command line sets another key of the model or
            encoder.
    """
    stored = next(
        (path for name in ("config.yaml", "ranker.yaml") if (path := Path(cfg.checkpoint) / name).is_file()), None
    )
    if stored is None:  # a folder of another program; its content is known only when it is loaded
        return cfg
    trained = load_stored(stored)
    _check_kind(trained, Path(cfg.checkpoint), "train")
    if overrides_of("lora"):
        raise ConfigError(
            f"lora: expected none, since checkpoint={cfg.checkpoint} continues with its own weights; to train adapters "
            "on this model, set encoder.name to its model/"
        )
    if trained.get("passages") is not None and not overrides_of("passages"):
        cfg.passages = trained.passages
    may_change = {f"model.{key}" for key in training_keys("model", str(trained.model.get("_target_")))}
    for group in ("model", "encoder"):
        changed = {override.split("=", 1)[0].lstrip("+"): override for override in overrides_of(group)}
        for key, override in changed.items():
            if key == "model" and cfg.model.get("_target_") == trained.model.get("_target_"):
                continue
            if ".".join(key.split(".")[:2]) not in may_change:
                raise ConfigError(
                    f"{group}: expected the {group} of checkpoint={cfg.checkpoint}, got {override!r}; leave it out"
                )
            OmegaConf.update(trained, key, OmegaConf.select(cfg, key), force_add=True)
        cfg[group] = trained[group]
    return cfg


def resumed(cfg: DictConfig) -> DictConfig:
    """Return the stored configuration of the run that is continued, with the overrides of the command line.

    Raises:
        ConfigError: The checkpoint is no run folder of the same command, or the command line sets a key that may not
            change.
    """
    stored = Path(cfg.checkpoint) / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"checkpoint: expected a run folder with config.yaml to resume from, got {cfg.checkpoint!r}")
    continued = load_stored(stored)
    _check_kind(continued, Path(cfg.checkpoint), "pretrain" if "objective" in cfg else "train")
    for override in task_overrides():
        key = override.split("=", 1)[0].lstrip("+~")
        if key in FIXED or not any(f"{key}.".startswith(f"{changeable}.") for changeable in CHANGEABLE):
            raise ConfigError(
                f"{key}: expected the value of the run that is resumed, got {override!r}; "
                "leave it out, or start a new run without resume=true"
            )
        OmegaConf.update(continued, key, OmegaConf.select(cfg, key), merge=False)
    continued.cache_dir = cfg.get("cache_dir")  # a stored file may not decide where this program writes
    if "prune" in (continued.get("callbacks") or {}) and not overrides_of("callbacks"):
        del continued.callbacks["prune"]  # the run was a trial of a sweep, which no longer waits for its result
    return continued


def _check_kind(stored: DictConfig, path: Path, command: str) -> None:
    """Refuse a stored configuration of another command.

    Args:
        stored: The stored configuration of a run folder or model folder.
        path: The folder.
        command: `train` or `pretrain`.

    Raises:
        ConfigError: The configuration belongs to another command.
    """
    trained = stored.get("loss" if (path / "config.yaml").is_file() else "model") is not None
    found = "pretrain" if stored.get("objective") is not None else "train" if trained else None
    if found == command:
        return
    fix = f"name a run folder of ranker {command}"
    if command == "train" and (path / "model").is_dir():
        start = "encoder.name" if found == "pretrain" else "checkpoint"
        fix = f"{start}={path / 'model'} starts from its model"
    raise ConfigError(
        f"checkpoint: expected a run of ranker {command}, got one of "
        f"{'ranker ' + found if found else 'another command'} ({path}); {fix}"
    )
