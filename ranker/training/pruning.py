"""Give up a trial of an Optuna sweep that is hopeless at a validation."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from ranker.errors import ConfigError

log = logging.getLogger(__name__)


class Prune(pl.Callback):
    """Report each validation to the study, and stop a trial that is worse than most others were at the same validation.

    The sweeper adds it to its jobs. Trials are compared validation by validation: the n-th of one with the n-th of the
    others, whatever the number of steps between them. The last validation prunes nothing, since nothing is left to
    save.

    Args:
        storage: Where the study is kept, a URL of SQLAlchemy.
        study: The study's name there.
        trial: The trial's number.
        monitor: The logged measure.
        keep: Percent of the trials that are kept: 50 prunes what is worse than the others' median at this validation,
            25 also what is worse than the best quarter of them.
        startup_trials: So many trials must have finished before any is pruned.
        warmup: So many validations go by before a trial can be pruned.
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
        """Find the trial; one that is over, as in a job's repetition, is left alone."""
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
            log.info("trial %d of study %s is over: nothing is reported to it", self.number, self.study)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Report, and stop on all devices where the first says so."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validations += 1
        hopeless = False
        if self._trial is not None:
            self._trial.report(float(trainer.callback_metrics[self.monitor]), self.validations)
            hopeless = trainer.global_step < trainer.estimated_stepping_batches and self._trial.should_prune()
        self.pruned = bool(trainer.strategy.broadcast(hopeless))
        if self.pruned:
            log.info("pruned: at validation %d most trials were better", self.validations)
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The number of validations, for a training that goes on."""
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.validations = state_dict["validations"]
