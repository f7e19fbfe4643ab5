"""A progress bar that does not make the host wait for the GPU."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's progress bar, which also shows the values in the module's dictionary `shown`.

    Lightning reads values logged with `prog_bar=True` from the device after each step, even if no bar is shown. The
    host then waits for the whole step, and afterwards the GPU waits until the next step's kernels are launched. The
    values in `shown` are already on the host; the loss arrives there one step late.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the values at the end of the bar."""
        shown: dict[str, Any] = getattr(pl_module, "shown", {})
        return {**super().get_metrics(trainer, pl_module), **shown}
