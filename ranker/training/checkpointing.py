"""Decide when checkpoints are written: `SaveBest` writes the best one, `SaveLast` the last one."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from ranker.errors import Preempted
from ranker.training.checkpoint_files import PREVIOUS, fault, link

log = logging.getLogger(__name__)


class SaveBest(ModelCheckpoint):
    """Keep `best.ckpt`, the checkpoint with the highest value of a monitored measure.

    A resumed run links the earlier run's best checkpoint into its folder.

    Args:
        folder: Folder of the file.
        monitor: Name of the logged measure.
        resumed: Folder of the checkpoint from which the run resumes. The earlier best checkpoint is looked up in this
            folder first, and then at its stored path, because run folders may have moved.
    """

    def __init__(self, folder: Path, monitor: str | None, resumed: Path | None = None) -> None:
        super().__init__(
            folder,
            filename="best",
            monitor=monitor,
            mode="max",
            save_top_k=1,
            enable_version_counter=False,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,  # saves after the validation, before `SaveLast` stores the best score
        )
        self._resumed = resumed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Link the earlier best checkpoint into this folder. Lightning would forget its score in a new folder."""
        stored, score = state_dict["best_model_path"], state_dict["best_model_score"]
        assert self.dirpath is not None
        best = Path(self.dirpath) / "best.ckpt"
        if not stored or score is None:
            return
        paths = [Path(stored), *([self._resumed / "best.ckpt"] if self._resumed is not None else [])][::-1]
        faults = {path: fault(path) for path in paths}
        earlier = next((path for path in paths if faults[path] is None), None)
        if earlier is None:
            rank_zero_only(log.warning)(
                "%s: expected the best checkpoint so far, got %s; from now on, the best of the new ones is kept",
                paths[0],
                faults[paths[0]],
            )
            return
        if earlier != best:
            rank_zero_only(link)(earlier, best)
        self.best_model_path = self.kth_best_model_path = str(best)
        self.best_model_score = self.kth_value = score
        self.best_k_models = {str(best): score}


class SaveLast(Checkpoint):
    """Write `last.ckpt` every n optimizer steps, after each validation, at the end, and at SIGTERM.

    The replaced checkpoint is kept as `previous.ckpt`. If a validation is due at a step, the checkpoint is written
    after the validation; otherwise a resumed run would skip that validation. The last step is always validated, even
    if no validation is scheduled for it. This happens at `max_steps` in the middle of an epoch, and in an epoch that
    `check_val_every_n_epoch` leaves out.

    Lightning calls `Checkpoint` callbacks after all other callbacks, in the given order. This callback must be the last
    one, so that it saves the state of the others.

    Args:
        path: The file.
        every_steps: Steps between two checkpoints.
        resumed: The checkpoint from which the training resumes. It is linked to `path` until a new one is written.
        command: The command that resumes the training; the message at SIGTERM shows it.
    """

    def __init__(
        self, path: Path, every_steps: int, resumed: Path | None = None, command: str = "python train.py"
    ) -> None:
        self.path, self.every_steps, self.resumed, self.command = path, every_steps, resumed, command
        self._saved = -1
        self._row: dict[str, float] = {}  # values of the last step that the loggers do not have yet
        self._is_extra_validation = False  # whether the next validation is the unscheduled one after the last step

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._saved and not trainer.sanity_checking:
            self._saved = trainer.global_step
            for logger in trainer.loggers:  # flush, so that no value logged before the checkpoint can be lost
                logger.save()
            # a collective: all processes call it
            trainer.save_checkpoint(self.path, storage_options={"previous": self.path.with_name(PREVIOUS)})

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Link the checkpoint from which the training resumes, in case a kill comes before the first new checkpoint."""
        if self.resumed is not None:
            rank_zero_only(link)(self.resumed, self.path)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replace Lightning's SIGTERM handler, which would start a collective in the middle of a step."""
        _on_sigterm(lambda *_: setattr(module, "stop_asked", True))
        # after each step, Lightning would broadcast whether a process received SIGTERM; the host would wait for the GPU
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        for logger in trainer.loggers if self._row else ():
            logger.log_metrics(self._row, step=trainer.global_step - 1)
        self._row = {}
        loop = trainer.fit_loop.epoch_loop
        done = loop.batch_progress.current.completed
        if loop.restarting and done and _validate_last(trainer, done - 1) and not _validation_is_due(trainer, done - 1):
            # this checkpoint was written after the unscheduled validation of the last step; without the next line,
            # Lightning would train one more step
            trainer.should_stop = True
        # if the run had stopped early and was killed before it ended, stop again, without a validation
        stoppers = (callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping))  # type: ignore[attr-defined]
        # patience 0, like 1, stops at the first validation without improvement
        if any(callback.wait_count >= max(callback.patience, 1) for callback in stoppers):
            trainer.should_stop = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save at every n-th step and after a request to stop, unless a validation is due."""
        last = _validate_last(trainer, batch_idx)
        stop = bool(module.stop_asked if trainer.world_size == 1 else module.stop_agreed)
        due = _validation_is_due(trainer, batch_idx)
        if last and not due:
            trainer.should_stop = True  # makes Lightning validate after this step
        # `should_stop` alone does not end a training before `min_steps` or `min_epochs`
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early
        if ends and trainer.check_val_every_n_epoch is not None:  # for example at `max_time`: validate after this step
            trainer.check_val_every_n_epoch = 1
        self._is_extra_validation = ends and not due
        if due or (ends and _validates_in_this_epoch(trainer)):
            return
        if stop or trainer.global_step % self.every_steps == 0:
            # loggers get this step's values only after the checkpoint is written, so the checkpoint stores the values
            if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                self._row = {
                    name: float(v)
                    for name, v in trainer.callback_metrics.items()
                    if name.startswith(("train/", "optim/"))
                }
            self._save(trainer)
            self._row = {}
        if stop:
            raise self._preempted(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the values that are not logged yet.

        In an unscheduled validation, also store the last step as done: Lightning counts it only after the validation.
        """
        checkpoint["unlogged"] = self._row
        if self._is_extra_validation and trainer.validating:
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] += 1

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the values that were not logged yet."""
        self._row = checkpoint.get("unlogged", {})

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Save after a validation."""
        if trainer.state.fn == "fit":
            self._save(trainer)
            if trainer.strategy.reduce_boolean_decision(bool(module.stop_asked), all=False):
                raise self._preempted(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Save the final state."""
        self._save(trainer)

    @contextmanager
    def ends_at_sigterm(self, trainer: pl.Trainer) -> Iterator[None]:
        """End the process at once if SIGTERM comes while the context is open.

        This is for the time after a training, when everything is saved.

        Raises:
            Preempted: SIGTERM was received.
        """

        def stop(*_: Any) -> None:
            raise self._preempted(trainer)

        before = signal.getsignal(signal.SIGTERM)
        _on_sigterm(stop)
        try:
            yield
        finally:
            _on_sigterm(signal.SIG_DFL if before is None else before)

    def _preempted(self, trainer: pl.Trainer) -> Preempted:
        log.info("stopped by SIGTERM after step %d", trainer.global_step)
        # The launcher kills the parent if a child ends with another code than 0, so a child of Lightning's launcher
        # ends with 0. The child prints no message, since the parent prints one.
        environment = getattr(trainer.strategy, "cluster_environment", None)
        is_child = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0  # type: ignore[attr-defined]
        text = (
            f"stopped by SIGTERM after step {trainer.global_step}, which is saved; "
            f"go on with {self.command} checkpoint={self.path.parent.parent} resume=true"
        )
        return Preempted("" if trainer.global_rank > 0 else text, 0 if is_child else Preempted.exit_code)


def _on_sigterm(handler: Callable[..., Any] | int | signal.Handlers | None) -> None:
    """Set SIGTERM's handler, if this is the main thread: no other thread may. Lightning restores the old handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _validate_last(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether this was the last step according to `max_steps` or `max_epochs`.

    If so, `check_val_every_n_epoch` is set to 1, so that this epoch is validated.
    """
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    last = 0 < trainer.max_steps <= trainer.global_step or (
        epochs is not None and 0 < epochs <= trainer.current_epoch + 1 and batch_idx + 1 >= batches
    )
    if last and trainer.check_val_every_n_epoch is not None:
        trainer.check_val_every_n_epoch = 1
    return last


def _validates_in_this_epoch(trainer: pl.Trainer) -> bool:
    epochs = trainer.check_val_every_n_epoch
    return trainer.enable_validation and (epochs is None or (trainer.current_epoch + 1) % epochs == 0)


def _validation_is_due(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether a validation is scheduled after this step."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not _validates_in_this_epoch(trainer):
        return False
    done = trainer.fit_loop.epoch_loop.total_batch_idx if epochs is None else batch_idx
    return every not in (None, float("inf")) and (done + 1) % int(every) == 0  # type: ignore[arg-type]
