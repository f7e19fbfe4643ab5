"""A progress bar that does not make the host wait for the GPU."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's progress bar, which also shows the values in the module's dictionary `shown`.

    Lightning reads values logged with `prog_bar=True` from the device after each step, whether a bar is shown or not.
    The host then waits for the whole step, and afterwards the GPU waits for the kernel launches of the next step. The
    values in `shown` are on the host already; the loss arrives there one step late.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The values at the end of the bar."""
        shown: dict[str, Any] = getattr(pl_module, "shown", {})
        return {**super().get_metrics(trainer, pl_module), **shown}
