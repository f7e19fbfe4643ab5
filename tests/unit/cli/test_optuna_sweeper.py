import functools
import json
import os
from types import SimpleNamespace

import optuna
import pytest
from filelock import FileLock
from omegaconf import OmegaConf

import ranker.cli.sweep
import ranker.cli.sweep_table
from hydra_plugins.ranker_sweeps import OptunaSweeper, SweepFolder
from ranker.cli.sweep_trials import settle_dead_trials


class Jobs:
    """A launcher whose jobs end with given outcomes, in order."""

    def __init__(self, folder, ends):
        self.folder, self.ends, self.batches = folder, iter(ends), []

    def launch(self, jobs, initial_job_idx):
        self.batches.append(len(jobs))
        returns = []
        for number in range(initial_job_idx, initial_job_idx + len(jobs)):
            where = self.folder / str(number)
            where.mkdir()
            status = next(self.ends)
            (where / "job.json").write_text(
                json.dumps({"status": status, "objective": None if status == "failed" else 0.5})
            )
            runtime = SimpleNamespace(output_dir=str(where))
            returns.append(SimpleNamespace(hydra_cfg=SimpleNamespace(hydra=SimpleNamespace(runtime=runtime))))
        return returns


def sweep(folder, storage, ends, n_trials, n_jobs=1):
    """Run a sweep whose jobs have these outcomes; returns the number of jobs in each batch."""
    sweeper = OptunaSweeper(
        n_trials, n_jobs, "maximize", storage, "sweep", optuna.samplers.RandomSampler(0), None, None
    )
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})
    sweeper.launcher, sweeper.validate_batch_is_legal = Jobs(folder, ends), lambda jobs: None
    sweeper.sweep(["optim.lr=interval(0.0, 1.0)"])
    return sweeper.launcher.batches


@pytest.mark.parametrize(
    ("ends", "n_jobs", "batches"),
    [
        (["ok", "failed", "pruned", "ok"], 1, [1, 1, 1, 1]),
        (["ok", "failed", "failed", "pruned", "ok"], 2, [2, 2, 1]),
        (["failed", "failed", "failed"], 1, [1, 1, 1]),
        (["failed", "failed", "failed", "ok"], 2, [2, 2]),
    ],
)
def test_a_failed_trial_is_made_up_for_until_as_many_have_failed(tmp_path, capsys, ends, n_jobs, batches):
    storage = optuna.storages.InMemoryStorage()
    assert sweep(tmp_path, storage, ends, 3, n_jobs) == batches
    gave_up = ends.count("failed") == 3
    assert capsys.readouterr().err.count("error: sweep: 3 trials have failed, giving up") == gave_up
    states = {"ok": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    assert [trial.state.name for trial in optuna.load_study(study_name="sweep", storage=storage).trials] == [
        states[end] for end in ends
    ]


def test_a_sweep_that_goes_on_makes_up_for_what_failed_before(tmp_path, capsys):
    storage = optuna.storages.InMemoryStorage()
    sweep(tmp_path, storage, ["failed", "failed"], 2)
    assert sweep(tmp_path, storage, ["ok", "ok"], 2) == [1, 1]
    assert "sweep: goes on after 0 finished trials" in capsys.readouterr().err


def dies(folder, storage, when):
    """Run a sweep of three trials in a process that is killed in its second one."""

    class Mortal(Jobs):
        def launch(self, jobs, initial_job_idx):
            if initial_job_idx == 1 and when == "before the job":
                os._exit(9)

            def work():
                if initial_job_idx == 1 and when == "within the job":
                    os._exit(9)
                return 0.5

            where = self.folder / str(initial_job_idx)
            ranker.cli.sweep.run_job(self.folder, where, initial_job_idx, list(jobs[0]), work)
            if initial_job_idx == 1 and when == "before the study knows":
                os._exit(9)
            runtime = SimpleNamespace(output_dir=str(where))
            return [SimpleNamespace(hydra_cfg=SimpleNamespace(hydra=SimpleNamespace(runtime=runtime)))]

    sweeper = OptunaSweeper(3, 1, "maximize", storage, "sweep", optuna.samplers.RandomSampler(0), None, None)
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})
    sweeper.launcher, sweeper.validate_batch_is_legal = Mortal(folder, []), lambda jobs: None
    process = os.fork()
    if not process:
        sweeper.sweep(["optim.lr=interval(0.0, 1.0)"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    return sweeper


@pytest.mark.parametrize("when", ["before the job", "within the job", "before the study knows"])
def test_a_killed_sweep_goes_on_makes_up_for_its_dead_trial_and_ends_well(tmp_path, capsys, when):
    storage = f"sqlite:///{tmp_path}/study.db"
    sweeper = dies(tmp_path, storage, when)
    status = {"before the job": [], "within the job": ["killed"], "before the study knows": ["ok"]}[when]
    assert [row["status"] for row in ranker.cli.sweep_table.read_jobs(tmp_path)] == ["ok", *status]
    assert len(list(tmp_path.glob(".sweeper-*.lock"))) == 1
    sweeper.launcher.launch = functools.partial(launch_well, tmp_path)
    sweeper.sweep(["optim.lr=interval(0.0, 1.0)"])
    states = [trial.state.name for trial in optuna.load_study(study_name="sweep", storage=storage).trials]
    assert states == (["COMPLETE"] * 3 if status == ["ok"] else ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"])
    assert not list(tmp_path.glob(".sweeper-*.lock"))
    hydra = {
        "launcher": {"_target_": "x"},
        "sweeper": {"direction": "maximize", "n_trials": 3},
        "sweep": {"dir": str(tmp_path)},
    }
    SweepFolder().on_multirun_end(OmegaConf.create({"hydra": hydra}))  # no SystemExit
    assert ("warning: job 1 killed: its process was killed" in capsys.readouterr().err) == (status == ["killed"])
    hydra["sweeper"]["n_trials"] = 4
    with pytest.raises(SystemExit):
        SweepFolder().on_multirun_end(OmegaConf.create({"hydra": hydra}))


def launch_well(folder, jobs, initial_job_idx):
    where = folder / str(initial_job_idx)
    ranker.cli.sweep.run_job(folder, where, initial_job_idx, list(jobs[0]), lambda: 0.5)
    runtime = SimpleNamespace(output_dir=str(where))
    return [SimpleNamespace(hydra_cfg=SimpleNamespace(hydra=SimpleNamespace(runtime=runtime)))]


def test_trials_of_a_living_sweep_or_job_are_left_alone(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="sweep", direction="maximize")
    trials = [study.ask() for _ in range(3)]
    trials[0].set_user_attr("sweeper", ".sweeper-other.lock")
    trials[1].set_user_attr("sweeper", ".sweeper-dead.lock")
    with FileLock(tmp_path / ".sweeper-other.lock"):
        settle_dead_trials(study, tmp_path, tmp_path / ".sweeper-own.lock")
        assert [trial.state.name for trial in study.trials] == [
            "RUNNING",
            "FAIL",
            "RUNNING",
        ]  # the third trial has no process yet
    (tmp_path / "2").mkdir()
    (tmp_path / "2/job.json").write_text(json.dumps({"job": 2, "status": "running", "objective": None}))
    with FileLock(tmp_path / "2/.job.lock"):
        settle_dead_trials(study, tmp_path, tmp_path / ".sweeper-own.lock")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "RUNNING"]
