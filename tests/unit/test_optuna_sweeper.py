import json
from types import SimpleNamespace

import optuna
import pytest
from omegaconf import OmegaConf

from hydra_plugins.ranker_sweeps import OptunaSweeper


class Jobs:
    """A launcher whose jobs end as they are told to, in order."""

    def __init__(self, folder, ends):
        self.folder, self.ends, self.batches = folder, iter(ends), []

    def launch(self, jobs, initial_job_idx):
        self.batches.append(len(jobs))
        returns = []
        for number in range(initial_job_idx, initial_job_idx + len(jobs)):
            where = self.folder / str(number)
            where.mkdir()
            status = next(self.ends)
            (where / "job.json").write_text(json.dumps({"status": status, "objective": None if status == "failed" else 0.5}))
            runtime = SimpleNamespace(output_dir=str(where))
            returns.append(SimpleNamespace(hydra_cfg=SimpleNamespace(hydra=SimpleNamespace(runtime=runtime))))
        return returns


def sweep(folder, storage, ends, n_trials, n_jobs=1):
    """Run a sweep of such jobs; returns the batches' sizes."""
    sweeper = OptunaSweeper(n_trials, n_jobs, "maximize", storage, "sweep", optuna.samplers.RandomSampler(0), None, None)
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
    assert [trial.state.name for trial in optuna.load_study(study_name="sweep", storage=storage).trials] == [states[end] for end in ends]


def test_a_sweep_that_goes_on_makes_up_for_what_failed_before(tmp_path, capsys):
    storage = optuna.storages.InMemoryStorage()
    sweep(tmp_path, storage, ["failed", "failed"], 2)
    assert sweep(tmp_path, storage, ["ok", "ok"], 2) == [1, 1]
    assert "sweep: goes on after 0 finished trials" in capsys.readouterr().err
