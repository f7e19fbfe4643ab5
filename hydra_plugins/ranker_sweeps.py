"""Hydra plugins for sweeps: the sweep's folder, Optuna's search, and a launcher that only prints jobs.

Hydra finds plugins only in the package `hydra_plugins`. It imports all of this package at every start, so imports here
must be fast.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ranker import run_folder
from ranker.cli.sweep import JOB_FOLDER
from ranker.cli.sweep_start import check_unused, check_unused_by_sweep, fail, num_jobs
from ranker.cli.sweep_table import finish_sweep, job_folders, read_job
from ranker.cli.sweep_trials import distribution, num_finished, settle_dead_trials
from ranker.errors import ConfigError
from ranker.files.space import no_room, room_for
from ranker.files.writing import write_whole
from ranker.processes import is_first_process


def quoted(text: str) -> str:
    """Quote a text so that Hydra's grammar of overrides reads it as one value."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


class SweepFolder(Callback):
    """Keep all jobs of a sweep in one folder. At its end, write a table and a picture, and set the exit code."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a used folder for a single run, before Hydra writes logs and configurations to it."""
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)  # needed, because the folder's name may depend on it
        with suppress(Exception):  # Hydra will raise the same error again and report it
            folder = Path(config.hydra.run.dir)
            run_folder.note(folder)
            made_by_sweep = os.environ.get(JOB_FOLDER) == str(folder.absolute())
            if is_first_process() and not made_by_sweep:
                check_unused("hydra.run.dir", folder)
        HydraConfig.instance().cfg = before

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Fix the folder, print the number of jobs; exit on errors, because Hydra only warns of a callback's errors."""
        folder = Path(config.hydra.sweep.dir).resolve()
        run_folder.note(folder)
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = str(folder)
            # jobs are composed again, some of them in other processes, where `stamp` and `name` would have other values
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(folder))}")
        if config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            if folder.is_dir() and any(job_folders(folder)):
                fail(f"hydra.sweep.dir: expected a new folder, got {folder}, which holds another sweep")
            number = num_jobs(config)
            check_unused_by_sweep(folder)
        else:
            if not _is_search(folder):  # a search in its old folder is continued
                check_unused_by_sweep(folder)
            number = f"up to {config.hydra.sweeper.get('n_trials', '?')}"
        for name in ("hydra", "hydra_plugins"):  # launchers would repeat what the jobs log themselves
            logging.getLogger(name).setLevel(logging.WARNING)
        print(f"sweep: {number} {'job' if number == '1' else 'jobs'} under {folder}", file=sys.stderr, flush=True)  # noqa: T201
        if not config.hydra.launcher._target_.endswith(".DryRun"):
            folder.mkdir(parents=True, exist_ok=True)
            with write_whole(folder / "multirun.yaml") as file:
                file.write(OmegaConf.to_yaml(config))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Write `summary.csv` and the picture; exit with 1 if a job failed, or too few trials of a search finished."""
        if config.hydra.launcher._target_.endswith(".DryRun"):
            return
        direction = str(config.hydra.sweeper.get("direction", "maximize"))
        if not finish_sweep(
            Path(config.hydra.sweep.dir), direction == "maximize", config.hydra.sweeper.get("n_trials")
        ):
            raise SystemExit(1)


def _is_search(folder: Path) -> bool:
    """Return whether a folder belongs to an Optuna search of this program."""
    try:
        return f"{OptunaSweeper.__module__}.{OptunaSweeper.__name__}" in (folder / "multirun.yaml").read_text(
            encoding="utf-8"
        )
    except (OSError, ValueError):
        return False


class DryRun(Launcher):
    """Compose and check every job, and print its overrides. No job runs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:  # noqa: ARG002
        """Store the arguments that `launch` needs."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Print the jobs, and raise the faults of all jobs in one error."""
        from ranker.config import check as config

        setup_globals()
        folder = Path(self.config.hydra.sweep.dir)
        if self.config.hydra.sweeper._target_.endswith(
            ".BasicSweeper"
        ):  # the sweeper wrote this file to a folder that is not used
            (folder / "multirun.yaml").unlink(missing_ok=True)
            if run_folder.is_new(folder):
                with suppress(OSError):  # fails if the folder is not empty
                    folder.rmdir()
        faults, returns = [], []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            print(f"job {number}: {' '.join(overrides)}", file=sys.stderr, flush=True)  # noqa: T201
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(cfg):
                del cfg["hydra"]
            try:
                config.check(cfg)
            except ConfigError as error:
                faults += [f"job {number}: {line}" for line in str(error).split("\n")]
            returned = JobReturn(overrides=list(overrides), cfg=cfg, status=JobStatus.COMPLETED)
            returned.return_value = None
            returns.append(returned)
        if faults:
            raise ConfigError("\n".join(faults))
        return returns


class OptunaSweeper(Sweeper):
    """Search with Optuna. Each trial is the job with the same number. An unpromising trial is pruned at a validation.

    To continue a search that was stopped, set `hydra.sweep.dir` to its folder. The study in this folder is loaded, and
    the missing trials run.

    Args:
        n_trials: Number of trials that must end with an objective or be pruned; trials before a continuation count. A
            failed trial is replaced by a new one, until `n_trials` trials have failed.
        n_jobs: Number of trials in parallel, for launchers that can run several.
        direction: `maximize` or `minimize`.
        storage: URL of the study's database (SQLAlchemy).
        study_name: The study's name in the database.
        sampler: One of `optuna.samplers`.
        pruning: Arguments of `ranker.training.pruning.Prune`; None: no pruning.
        params: Key -> values, in the grammar of the command line, which overrides them.
    """

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        direction: Literal["maximize", "minimize"],
        storage: str,
        study_name: str,
        sampler: Any,
        pruning: Mapping[str, Any] | None,
        params: Mapping[str, Any] | None,
    ) -> None:
        self.n_trials, self.n_jobs, self.direction = n_trials, n_jobs, direction
        self.storage, self.study_name, self.sampler = storage, study_name, sampler
        self.pruning, self.params = pruning, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher."""
        from hydra.core.plugins import Plugins

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until `n_trials` have finished."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        given = OverridesParser.create().parse_overrides(arguments)
        defaults = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in self.params.items()])
        overrides = {override.get_key_element().lstrip("+"): override for override in [*defaults, *given]}
        space = {
            override.get_key_element(): distribution(override)
            for override in overrides.values()
            if override.is_sweep_override()
        }
        fixed = [_as_text(override) for override in overrides.values() if not override.is_sweep_override()]
        if not space:
            raise ConfigError(
                "hydra.sweeper.params: expected keys, such as 'optim.lr=tag(log, interval(1e-5, 1e-3))', got none"
            )
        assert self.launcher is not None
        assert self.config is not None
        if isinstance(self.launcher, DryRun):  # values are drawn only when a trial starts, so print one example
            lowest = [
                f"{key}={drawn.low if hasattr(drawn, 'low') else drawn.choices[0]}" for key, drawn in space.items()
            ]
            self.launcher.launch([[*fixed, *lowest]], 0)
            return
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = folder / f".sweeper-{secrets.token_hex(4)}.lock"
        from filelock import FileLock  # imported here, because Hydra imports this module in every run

        fix = "make room; the study is kept, and the same hydra.sweep.dir continues it"
        with FileLock(self._lock), room_for(self.storage, fix):
            self._search(self._study(folder), space, fixed)
        self._lock.unlink(missing_ok=True)

    def _study(self, folder: Path) -> Any:
        """Load or create the study. Trials that a killed search left running get their final state."""
        import optuna

        try:
            study = optuna.create_study(
                storage=self.storage,
                sampler=self.sampler,
                study_name=self.study_name,
                direction=self.direction,
                load_if_exists=True,
            )
            if not study.trials and any(job_folders(folder)):
                raise ValueError(f"no trials, though {folder} holds jobs")
            settle_dead_trials(study, folder, self._lock)
        except Exception as error:  # errors of Optuna, of SQLAlchemy and of the database
            if no_room(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"hydra.sweeper.storage: expected Optuna's study in {self.storage}, "
                f"got one that can't be read ({reason}); restore it, or search anew in another hydra.sweep.dir"
            ) from error
        return study

    def _search(self, study: Any, space: dict[str, Any], fixed: list[str]) -> None:
        if study.trials:
            print(f"sweep: goes on after {num_finished(study)} finished trials", file=sys.stderr, flush=True)  # noqa: T201
            self.sampler.reseed_rng()  # with the old seed, the sampler would repeat the first trials
        failed = 0
        while (missing := self.n_trials - num_finished(study)) > 0 and failed < self.n_trials:
            failed += self._run([study.ask(space) for _ in range(min(self.n_jobs, missing))], study, fixed)
        if missing > 0:
            print(  # noqa: T201
                f"error: sweep: {failed} trials have failed, giving up; {missing} of {self.n_trials} are missing",
                file=sys.stderr,
            )

    def _run(self, trials: Sequence[Any], study: Any, fixed: Sequence[str]) -> int:
        """Launch trials, and report their results to the study; return the number of failed trials."""
        from optuna.trial import TrialState

        jobs = []
        for trial in trials:
            trial.set_user_attr("sweeper", self._lock.name)
            jobs.append(
                [*fixed, *(f"{key}={value}" for key, value in trial.params.items()), *self._prune(trial.number)]
            )
        assert self.launcher is not None
        try:
            self.validate_batch_is_legal(jobs)
            returns = self.launcher.launch(jobs, initial_job_idx=trials[0].number)
        except BaseException:
            for trial in trials:
                study.tell(trial, state=TrialState.FAIL)
            raise
        failed = 0
        for trial, returned in zip(trials, returns, strict=True):
            composed: Any = returned.hydra_cfg
            folder = Path(composed.hydra.runtime.output_dir)
            row = read_job(folder)
            if row["status"] == "pruned":
                study.tell(trial, state=TrialState.PRUNED)
            elif row["status"] == "ok" and row["objective"] is not None:
                study.tell(trial, row["objective"])
            else:
                study.tell(trial, state=TrialState.FAIL)
                failed += 1
        return failed

    def _prune(self, number: int) -> list[str]:
        if self.pruning is None:
            return []
        arguments = {
            "storage": quoted(self.storage),
            "study": quoted(self.study_name),
            "trial": number,
            "monitor": "'${monitor}'",
            **self.pruning,
        }
        return [
            "++callbacks.prune={_target_:ranker.training.pruning.Prune,"
            + ",".join(f"{key}:{value}" for key, value in arguments.items())
            + "}"
        ]


def _as_text(override: Override) -> str:
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"
