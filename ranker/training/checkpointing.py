"""When checkpoints are written: the best by `SaveBest`, the last by `SaveLast`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only


class SaveBest(ModelCheckpoint):
    """Keep `best.ckpt` by a monitored measure, higher is better; a run that goes on in another folder takes the best so far along.

    Args:
        folder: Where to.
        monitor: The logged measure.
    """

    def __init__(self, folder: Path, monitor: str | None) -> None:
        super().__init__(
            folder, filename="best", monitor=monitor, mode="max", save_top_k=1, enable_version_counter=False, auto_insert_metric_name=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the earlier best into this folder: Lightning would forget its score when the folder is another."""
        earlier, score = Path(state_dict["best_model_path"] or "."), state_dict["best_model_score"]
        assert self.dirpath is not None
        best = Path(self.dirpath) / "best.ckpt"
        if not earlier.is_file() or score is None or earlier == best:
            super().load_state_dict(state_dict)
            return
        _copy(earlier, best)
        self.best_model_path = self.kth_best_model_path = str(best)
        self.best_model_score = self.kth_value = score
        self.best_k_models = {str(best): score}


@rank_zero_only
def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


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
