"""The trials of an Optuna study: where their values are drawn from, how many finished, which a killed search left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from ranker.cli.sweep_table import is_locked, read_jobs


def distribution(override: Override) -> Any:
    """Return the distribution from which Optuna draws the value of a key.

    From a list or range, one of its members is drawn; from an interval, a number, with the tag `log` on a logarithmic
    scale.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if override.is_discrete_sweep():
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    interval: Any = override.value()
    logarithmic = "log" in interval.tags
    if isinstance(interval.start, int) and isinstance(interval.end, int):
        return IntDistribution(interval.start, interval.end, log=logarithmic)
    return FloatDistribution(float(interval.start), float(interval.end), log=logarithmic)


def num_finished(study: Any) -> int:
    """Return the number of trials that have an objective or were pruned."""
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


def settle_dead_trials(study: Any, folder: Path, own_lock: Path) -> None:
    """Report to the study the results of trials that a killed search left running.

    A trial whose job has finished gets the job's result. A trial is not changed if its job or its search still runs.
    All other trials are reported as failed.

    Args:
        study: Optuna's study.
        folder: The sweep's folder, in which each search holds a lock while it runs.
        own_lock: The lock of this search.
    """
    from optuna.trial import TrialState

    others = {lock: is_locked(lock) for lock in folder.glob(".sweeper-*.lock") if lock != own_lock}
    alive = {lock.name for lock, held in others.items() if held}
    for lock in others:
        if lock.name not in alive:
            lock.unlink(missing_ok=True)
    rows = {row["job"]: row for row in read_jobs(folder)}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        sweeper, row = trial.user_attrs.get("sweeper"), rows.get(trial.number, {"status": "killed"})
        if sweeper in alive or (sweeper is None and alive) or row["status"] == "running":
            continue
        if row["status"] == "ok" and row["objective"] is not None:
            study.tell(trial.number, row["objective"], skip_if_finished=True)
        else:
            state = TrialState.PRUNED if row["status"] == "pruned" else TrialState.FAIL
            study.tell(trial.number, state=state, skip_if_finished=True)
