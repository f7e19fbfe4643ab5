"""The progress bar, which no training waits for."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's, with what the module has in `shown`, a dict of plain numbers.

    What is logged with `prog_bar=True` Lightning reads from the device after each step, whether a bar is shown or not:
    the host then waits for the whole step, and the GPU for the next one's launches. Loss and gradient norm come to the
    host anyway, one step late.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands at the end of the bar."""
        shown: dict[str, Any] = getattr(pl_module, "shown", {})
        return {**super().get_metrics(trainer, pl_module), **shown}
