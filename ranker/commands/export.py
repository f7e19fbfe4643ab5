"""`ranker export`: write a trained model for other programs; keep the export if its scores equal the original's."""

from __future__ import annotations

from omegaconf import DictConfig

from ranker.assembly.exporting import export_checkpoint
from ranker.assembly.run import one_run


@one_run()
def export(cfg: DictConfig) -> None:
    """Write an export with `parity.json` and a README."""
    export_checkpoint(cfg)
