"""When checkpoints are written: the best by ModelCheckpoint, the last by `SaveLast`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class SaveLast(pl.Callback):
    """Write `last.ckpt` every n optimizer steps, at each validation and at the end.

    Where a validation is due at a step, the checkpoint waits for it: Lightning would skip that validation after a resume.

    Args:
        path: The file.
        every_steps: Steps between two checkpoints.
    """

    def __init__(self, path: Path, every_steps: int) -> None:
        self.path, self.every_steps = path, every_steps
        self._saved = -1

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._saved and not trainer.sanity_checking:
            self._saved = trainer.global_step
            trainer.save_checkpoint(self.path)  # on all devices: it is a collective

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Save when it is time and no validation is due."""
        every = trainer.val_check_batch
        due = trainer.enable_validation and isinstance(every, (int, float)) and (batch_idx + 1) % int(every) == 0
        if trainer.global_step % self.every_steps == 0 and not due:
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:  # noqa: ARG002
        """Save after a validation."""
        if trainer.state.fn == "fit":
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:  # noqa: ARG002
        """Save the end."""
        self._save(trainer)
