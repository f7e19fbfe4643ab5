"""Dashboards, each made for one run folder."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from ranker.errors import ConfigError


def csv(folder: Path) -> Logger:
    """`metrics.csv` in the run folder; a row's step counts optimizer steps from 0."""
    return CSVLogger(folder, name="", version="")


def tensorboard(folder: Path) -> Logger:
    """TensorBoard event files in `tensorboard/`."""
    return TensorBoardLogger(folder, name="tensorboard", version="")


def wandb(folder: Path, project: str = "ranker", mode: str = "offline", group: str | None = None, tags: list[str] | None = None) -> Logger:
    """A Weights & Biases run named after the run folder.

    Args:
        folder: The run folder.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name, for runs that belong together.
        tags: Tags.

    Raises:
        ConfigError: Online without a key: wandb would ask on the terminal and the run would wait for ever.
    """
    if mode not in ("offline", "online", "disabled"):
        raise ConfigError(f"logger.mode: expected offline, online or disabled; got {mode!r}")
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").is_file()):
        raise ConfigError(
            "logger.mode: expected a wandb key for mode online, got none; set WANDB_API_KEY, run `wandb login`, or take logger.mode=offline"
        )
    os.environ["WANDB_MODE"] = mode
    os.environ.setdefault("WANDB_SILENT", "true")
    return WandbLogger(
        name="/".join(folder.parts[-2:]), project=project, save_dir=folder, offline=mode == "offline", group=group, tags=tags or None
    )
