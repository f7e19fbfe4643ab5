"""Stop a trial of an Optuna sweep if its validation is worse than that of most other trials."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from ranker.errors import ConfigError
from ranker.files.space import room_for

log = logging.getLogger(__name__)


class Prune(pl.Callback):
    """Report each validation to the study. Stop a trial that is worse than most other trials at this validation.

    The sweeper adds this callback to its jobs. The n-th validation of a trial is compared with the n-th validations of
    the others, whatever number of steps lies between validations. The last validation never stops a trial, because the
    training is then over.

    Args:
        storage: SQLAlchemy URL of the study.
        study: Name of the study.
        trial: Index of the trial in the study.
        monitor: The logged measure.
        keep: Percentage of trials that are kept. 50 prunes a trial that is below the median of the others at this
            validation; 25 prunes a trial that is not in the best quarter.
        startup_trials: Number of trials that must finish before any trial is pruned.
        warmup: Number of validations before which a trial is not pruned.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        trial: int,
        monitor: str,
        keep: float = 50.0,
        startup_trials: int = 4,
        warmup: int = 0,
    ) -> None:
        self.storage, self.study, self.number, self.monitor = storage, study, trial, monitor
        self.keep, self.startup_trials, self.warmup = keep, startup_trials, warmup
        self.validations, self.pruned = 0, False
        self._trial: Any = None

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find the trial in the study. If it is finished (a repeated job), nothing is reported to it."""
        if not trainer.is_global_zero:
            return
        import optuna
        from optuna.trial import Trial, TrialState

        pruner = optuna.pruners.PercentilePruner(
            self.keep, n_startup_trials=self.startup_trials, n_warmup_steps=self.warmup + 1
        )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.load_study(study_name=self.study, storage=self.storage, pruner=pruner)
            frozen = study.trials[self.number]
        except (KeyError, IndexError) as error:
            raise ConfigError(
                f"callbacks.prune: expected trial {self.number} of study {self.study!r} in {self.storage}, got none"
            ) from error
        if frozen.state == TrialState.RUNNING:
            self._trial = Trial(study, frozen._trial_id)
        else:
            log.info("trial %d of study %s has ended: nothing is reported to it", self.number, self.study)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Report the measure; the first process decides whether all processes stop."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validations += 1
        prune = False
        if self._trial is not None:
            with room_for(self.storage):
                self._trial.report(float(trainer.callback_metrics[self.monitor]), self.validations)
            prune = trainer.global_step < trainer.estimated_stepping_batches and self._trial.should_prune()
        self.pruned = bool(trainer.strategy.broadcast(prune))
        if self.pruned:
            log.info("pruned: at validation %d, most other trials were better", self.validations)
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The number of validations, for a resumed training."""
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of validations."""
        self.validations = state_dict["validations"]
