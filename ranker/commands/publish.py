"""`ranker publish`: write or upload a run for others: weights, settings, test runs and a model card."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ranker import run_folder
from ranker.assembly.publishing import publish_checkpoint
from ranker.assembly.run import one_run


@one_run()
def publish(cfg: DictConfig) -> None:
    """Write the published folder to `to=`, or upload this folder with `to=hub:NAME`."""
    run_folder.discard(Path(HydraConfig.get().runtime.output_dir))  # all files are written to `to`
    publish_checkpoint(cfg)
