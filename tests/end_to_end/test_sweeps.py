"""Sweeps from the command line: one folder per job, one table, named failures, and an Optuna search that continues."""

import csv
import json
import shutil

import optuna
import pytest
from commands import ROOT, run, run_folder
from hydra import compose, initialize_config_dir

from ranker.cli import entry
from ranker.config.check import check

SMALL = [
    "encoder=tiny",
    "data=files",
    "data.path=small",
    "batch.queries=8",
    "batch.docs=4",
    "trainer.max_epochs=1",
    "optim.lr=3e-3",
    "depth=5",
    "trainer.enable_progress_bar=false",
    "report=none",
]
DRY = ["hydra/launcher=dry_run", "batch.docs=4,8"]
SEARCH = [
    "sweep=optuna_monobert",
    *SMALL,
    "name=search",
    "loss=lce",
    "batch.docs=4",
    "hydra.sweeper.pruning.keep=0",
    "hydra.sweeper.pruning.startup_trials=1",
    "trainer.max_epochs=2",
    "optim.lr=interval(1e-4, 1e-2)",
    "seed=range(0, 100)",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small_files):
    """A folder to start sweeps in, with their data."""
    where = tmp_path_factory.mktemp("sweeps")
    shutil.copytree(small_files, where / "small")
    return where


@pytest.fixture(scope="module")
def sweep(forks, folder):
    """Function that runs a sweep in that folder."""
    return lambda *arguments, **options: forks.run("train.py", "-m", *arguments, cwd=folder, **options)


@pytest.fixture(scope="module")
def grid(folder, sweep):
    """Folder and output of a sweep with three jobs, of which the second fails."""
    done = sweep(*SMALL, "name=grid", "batch.max_tokens=8192,16,400")
    assert done.code == 1, done.out
    return only(folder, "multirun/grid/*"), done.out


def rows_of(folder):
    with (folder / "summary.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def only(where, pattern):
    (found,) = where.glob(pattern)
    return found


def test_pc82_paths_are_the_launch_folders_and_each_job_has_its_own_results(grid, folder):
    results = {path.parent.name: json.loads(path.read_text()) for path in grid[0].glob("*/result.json")}
    assert results.keys() == {"0", "2"}
    # the token budget changes memory and speed, not the result
    assert results["0"]["objective"] == pytest.approx(results["2"]["objective"], abs=1e-6)
    assert not (folder / "outputs").exists()
    assert not (folder / "result.json").exists()


def test_pc83_the_failed_job_is_named_and_the_others_have_results(grid):
    where, out = grid
    assert out.startswith("sweep: 3 jobs under ")
    assert "error: job 1 failed: batch.max_tokens" in out
    assert "Error executing job" not in out
    assert "Traceback" in (where / "1/train.log").read_text()
    rows = rows_of(where)
    assert [(row["job"], row["status"], row["batch.max_tokens"]) for row in rows] == [
        ("0", "ok", "8192"),
        ("1", "failed", "16"),
        ("2", "ok", "400"),
    ]
    metrics = json.loads(only(where, "0/evaluation/*/metrics.json").read_text())["measures"]
    assert float(rows[0]["small/nDCG@10"]) == metrics["nDCG@10"]
    assert float(rows[0]["objective"]) == json.loads((where / "0/result.json").read_text())["objective"]
    assert rows[1]["objective"] == rows[1]["small/nDCG@10"] == ""
    assert rows[1]["error"].startswith("batch.max_tokens")
    assert (where / "pictures/sweep.png").stat().st_size > 2_000


def test_a_folder_that_holds_a_sweep_is_not_taken(grid, sweep):
    done = sweep(*SMALL, "seed=0,1", f"hydra.sweep.dir={grid[0]}")
    assert done.code == 1
    assert "hydra.sweep.dir: expected a new folder" in done.out
    assert len(rows_of(grid[0])) == 3


def test_pc80_a_comma_makes_jobs_unless_the_value_is_quoted_for_hydra(sweep):
    assert sweep(*DRY, "cache_dir=what is, this").out.startswith("sweep: 4 jobs under ")
    done = sweep(*DRY, 'cache_dir="what is, this"')
    assert done.out.startswith("sweep: 2 jobs under ")
    assert "job 1: batch.docs=8 cache_dir='what is, this'" in done.out.replace('"', "'")
    assert done.code == 0


def test_a_dry_run_finds_faults_and_leaves_nothing(sweep, folder):
    done = sweep("hydra/launcher=dry_run", "batch.docs=4,0", "name=dry")
    assert done.code == 1
    assert "error: job 1: batch.docs: expected at least 1, got 0" in done.out
    assert not list(folder.glob("multirun/dry/*"))


@pytest.mark.parametrize(
    ("written", "value"),
    [('checkpoint="epoch=3-step=100.ckpt"', "epoch=3-step=100.ckpt"), (r"checkpoint=epoch\=3.ckpt", "epoch=3.ckpt"),
     ("checkpoint=runs/2026-01-01_00-00-00-ab12/last.ckpt", "runs/2026-01-01_00-00-00-ab12/last.ckpt")],
)  # fmt: skip
def test_pc79_an_equals_sign_in_a_path(written, value):
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert compose("train", [written]).checkpoint == value


def test_an_optuna_sweep_prunes_and_goes_on_in_its_folder(sweep, folder):
    assert sweep(*SEARCH, "hydra.sweeper.n_trials=2").code == 0
    folder = only(folder, "multirun/search/*")
    done = sweep(*SEARCH, "hydra.sweeper.n_trials=3", f"hydra.sweep.dir={folder}")
    assert done.code == 0, done.out
    assert "goes on after 2 finished trials" in done.out
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder}/study.db")
    rows = rows_of(folder)
    assert [row["job"] for row in rows] == ["0", "1", "2"] == [str(trial.number) for trial in study.trials]
    assert "pruned" in [row["status"] for row in rows]
    for row, trial in zip(rows, study.trials, strict=True):
        assert row["status"] == {"COMPLETE": "ok", "PRUNED": "pruned"}[trial.state.name]
        assert float(row["optim.lr"]) == trial.params["optim.lr"]
        assert "prune" not in row["overrides"]
        result = json.loads((folder / row["job"] / "result.json").read_text())
        # the objective is that of the job's best validation; a pruned job stopped before its end and was not tested
        assert max(trial.intermediate_values.values()) == pytest.approx(result["objective"])
        assert result["pruned"] == (row["status"] == "pruned") == (result["steps"] < 6)
        assert bool(result["measures"]) == (row["status"] == "ok")
    assert len({row["optim.lr"] for row in rows}) == 3
    # keep=0 prunes a trial that is worse at its first of two validations than the best finished trial before it
    finished: list[float] = []
    for trial in study.trials:
        first = trial.intermediate_values[1]
        assert (trial.state.name == "PRUNED") == (first < max(finished, default=first))
        finished += [first] if trial.state.name == "COMPLETE" else []
    assert max(float(row["objective"]) for row in rows if row["status"] == "ok") == study.best_value


def test_joblib_runs_jobs_in_parallel(sweep, folder):
    done = sweep("sweep=joblib", *SMALL, "name=joblib", "trainer.max_steps=1", "seed=0,1", preloaded=True)
    assert done.code == 0, done.out
    folder = only(folder, "multirun/joblib/*")
    rows = rows_of(folder)
    assert [(row["job"], row["status"], row["seed"]) for row in rows] == [("0", "ok", "0"), ("1", "ok", "1")]
    assert [float(row["objective"]) for row in rows] == [
        json.loads((folder / job / "result.json").read_text())["objective"] for job in "01"
    ]
    assert (folder / "pictures/sweep.png").stat().st_size > 2_000


def test_jobs_of_other_processes_get_the_same_folder(tmp_path):
    # an error that is reported before torch is imported, so the test is fast
    done = run("train.py", "-m", "sweep=submitit_local", "monitor=val/a,val/b", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    folder = only(tmp_path, "multirun/monobert/*")
    rows = rows_of(folder)
    assert [(row["job"], row["status"], row["monitor"]) for row in rows] == [
        ("0", "failed", "val/a"),
        ("1", "failed", "val/b"),
    ]
    for number, name in ((0, "val/a"), (1, "val/b")):
        assert f"error: job {number} failed: monitor: expected one of" in done.stderr
        assert f"got '{name}'" in (folder / str(number) / "train.log").read_text()


@pytest.mark.parametrize("choice", ["optuna_monobert", "joblib", "slurm", "submitit_local", "ray"])
def test_every_sweep_composes(choice):
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [f"sweep={choice}", "hydra.sweep.dir=x"], return_hydra_config=True)
        check(compose("train", [f"sweep={choice}"]))
    package = {"optuna_monobert": "ranker_sweeps", "joblib": "hydra_joblib_launcher", "ray": "hydra_ray_launcher"}
    node = cfg.hydra.sweeper if choice == "optuna_monobert" else cfg.hydra.launcher
    assert package.get(choice, "hydra_submitit_launcher") in node._target_


def test_pc83_pc86_jobs_on_two_devices_are_what_single_runs_are_and_one_that_fails_leaves_the_others(
    forks, sweep, folder, tmp_path
):
    two_steps = [*SMALL, "trainer.max_steps=2"]
    # NaN from the second step on, in both processes: Lightning kills the first when the other dies
    rates = ("3e-3", "1e30", "1e-3")
    done = sweep(
        *two_steps,
        f"optim.lr={','.join(rates)}",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "name=two",
        preloaded=True,
    )
    assert done.code == 1
    two = only(folder, "multirun/two/*")
    rows = rows_of(two)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert "finite" in rows[1]["error"]
    assert sorted(path.name for path in two.iterdir() if path.is_dir()) == ["0", "1", "2", "pictures"]
    for job in ("0", "2"):
        where = tmp_path / job
        where.mkdir()
        done = forks.run(
            "train.py", *two_steps, f"optim.lr={rates[int(job)]}", f"data.path={folder / 'small'}", cwd=where
        )
        assert done.code == 0, done.out
        single, both = run_folder(where), two / job
        assert len(list(both.rglob("run.trec"))) == 1
        assert sorted(path.name for path in both.rglob("*.ckpt")) == sorted(
            path.name for path in single.rglob("*.ckpt")
        )
        one, other = (json.loads((path / "result.json").read_text()) for path in (single, both))
        assert other["objective"] == pytest.approx(one["objective"], abs=1e-6)
        assert other["measures"]["small"] == pytest.approx(one["measures"]["small"], abs=1e-6)
        assert other["steps"] == one["steps"] == 2
    assert rows[0]["objective"] != rows[2]["objective"]
    assert not (folder / "outputs").exists()
