"""When checkpoints are written: the best by `SaveBest`, the last by `SaveLast`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
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
    """Keep `best.ckpt` by a monitored measure, higher is better; a run that goes on in another folder takes the best so far along.

    Args:
        folder: Where to.
        monitor: The logged measure.
        resumed: The folder of the checkpoint that the run goes on from; its best is looked for there first, since
            folders move.
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
            save_on_train_epoch_end=False,  # right after the validation, so that `SaveLast` sees it
        )
        self._resumed = resumed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring the earlier best into this folder: Lightning would forget its score when the folder is another."""
        noted, score = state_dict["best_model_path"], state_dict["best_model_score"]
        assert self.dirpath is not None
        best = Path(self.dirpath) / "best.ckpt"
        if not noted or score is None:
            return
        places = [Path(noted), *([self._resumed / "best.ckpt"] if self._resumed is not None else [])][::-1]
        faults = {place: fault(place) for place in places}
        earlier = next((place for place in places if faults[place] is None), None)
        if earlier is None:
            rank_zero_only(log.warning)(
                "%s: expected the best checkpoint so far, got %s; the best is sought anew", places[0], faults[places[0]]
            )
            return
        if earlier != best:
            rank_zero_only(link)(earlier, best)
        self.best_model_path = self.kth_best_model_path = str(best)
        self.best_model_score = self.kth_value = score
        self.best_k_models = {str(best): score}


class SaveLast(Checkpoint):
    """Write `last.ckpt` every n optimizer steps, at each validation, at the end, and when SIGTERM asks the training to stop.

    The one before stays as `previous.ckpt`. Where a validation is due at a step, the checkpoint waits for it: Lightning
    would skip that validation after a resume. A training whose last step no scheduled validation follows is validated
    once more: one that ends at `max_steps` in the middle of an epoch, and one whose last epoch is none of every
    `check_val_every_n_epoch`.

    Lightning calls `Checkpoint`s after all other callbacks, in the order given: this one comes last, so that it saves
    what the others know.

    Args:
        path: The file.
        every_steps: Steps between two checkpoints.
        resumed: The checkpoint that the training goes on from; it is this run's last until there is a newer one.
    """

    def __init__(self, path: Path, every_steps: int, resumed: Path | None = None) -> None:
        self.path, self.every_steps, self.resumed = path, every_steps, resumed
        self._saved = -1
        self._row: dict[str, float] = {}
        self._once_more = False  # whether this is a validation at the end of a training, in the middle of an epoch

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._saved and not trainer.sanity_checking:
            self._saved = trainer.global_step
            for logger in trainer.loggers:  # what was logged up to the checkpoint is as safe as it is
                logger.save()
            trainer.save_checkpoint(
                self.path, storage_options={"previous": self.path.with_name(PREVIOUS)}
            )  # on all devices: a collective

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin with the checkpoint that the training goes on from, so that it can be killed and resumed in turn."""
        if self.resumed is not None:
            rank_zero_only(link)(self.resumed, self.path)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take over SIGTERM: Lightning's handler starts a collective wherever in a step the signal comes."""
        _on_sigterm(lambda *_: setattr(module, "stop_asked", True))
        # its broadcast of a signal that it no longer gets would make every device wait for its GPU at each step
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        for logger in trainer.loggers if self._row else ():
            logger.log_metrics(self._row, step=trainer.global_step - 1)
        self._row = {}
        loop = trainer.fit_loop.epoch_loop
        done = loop.batch_progress.current.completed
        if loop.restarting and done and _validate_last(trainer, done - 1) and not _validation_is_due(trainer, done - 1):
            trainer.should_stop = (
                True  # its last state was validated out of turn: Lightning would take another step instead
            )
        # a training that stopped early and was killed before its end: it has no validation that would tell it again
        stopped = (callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping))  # type: ignore[attr-defined]
        if any(
            callback.wait_count >= max(callback.patience, 1) for callback in stopped
        ):  # patience 0 stops at the first, too
            trainer.should_stop = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save when it is time, or when a device was asked to stop, and no validation is due."""
        last = _validate_last(trainer, batch_idx)
        stop = bool(module.stop_asked if trainer.world_size == 1 else module.stop_agreed)
        due = _validation_is_due(trainer, batch_idx)
        if last and not due:
            trainer.should_stop = True  # at which Lightning validates
        # `should_stop` alone does not end a training that has steps or epochs to do at least
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early
        if ends and trainer.check_val_every_n_epoch is not None:  # as `max_time` has it
            trainer.check_val_every_n_epoch = 1
        self._once_more = ends and not due
        if due or (ends and _validates_in_this_epoch(trainer)):
            return
        if stop or trainer.global_step % self.every_steps == 0:
            # Lightning hands this step's values to the loggers after the checkpoint: without them a resumed run would
            # lack them
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
        """Note what is not logged yet; and count the step of an unscheduled validation, which Lightning would count again by skipping it."""
        checkpoint["unlogged"] = self._row
        if self._once_more and trainer.validating:
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] += 1

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Log it in this run."""
        self._row = checkpoint.get("unlogged", {})

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Save after a validation."""
        if trainer.state.fn == "fit":
            self._save(trainer)
            if trainer.strategy.reduce_boolean_decision(bool(module.stop_asked), all=False):
                raise self._preempted(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Save the end."""
        self._save(trainer)

    def on_test_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """There is nothing left to save: SIGTERM ends the test at once."""

        def stop(*_: Any) -> None:
            raise self._preempted(trainer)

        _on_sigterm(stop)

    def _preempted(self, trainer: pl.Trainer) -> Preempted:
        log.info("stopped by SIGTERM after step %d", trainer.global_step)
        # a child of Lightning's launcher ends quietly: its parent speaks for it, and would be killed for a child's exit
        # code
        is_child = (
            isinstance(getattr(trainer.strategy, "cluster_environment", None), LightningEnvironment)
            and trainer.local_rank > 0
        )  # type: ignore[attr-defined]
        text = f"stopped by SIGTERM after step {trainer.global_step}, which is saved; go on with python train.py checkpoint={self.path.parent.parent} resume=true"
        return Preempted("" if trainer.global_rank > 0 else text, 0 if is_child else Preempted.exit_code)


def _on_sigterm(handler: Callable[..., None]) -> None:
    if (
        threading.current_thread() is threading.main_thread()
    ):  # Python takes handlers from no other; Lightning puts the old one back
        signal.signal(signal.SIGTERM, handler)


def _validate_last(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this was the training's last step, by `max_steps` or by `max_epochs`; its epoch is then one with validations."""
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
    """Whether a validation is scheduled after this step."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not _validates_in_this_epoch(trainer):
        return False
    done = trainer.fit_loop.epoch_loop.total_batch_idx if epochs is None else batch_idx
    return every not in (None, float("inf")) and (done + 1) % int(every) == 0  # type: ignore[arg-type]
