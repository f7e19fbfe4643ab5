"""Files that a run writes and removes: the user's files stay, error dumps stay, stored paths work from any folder."""

import json
import os
from pathlib import Path

import pytest
from commands import ROOT, run, run_all
from omegaconf import OmegaConf

TINY = [
    "encoder=tiny",
    "trainer.max_epochs=1",
    "batch.queries=8",
    "batch.docs=4",
    "depth=5",
    "trainer.enable_progress_bar=false",
    "report=none",
]
FILES = {
    "thesis.tex": "years of work",
    "model/weights": "w",
    "checkpoints/last.ckpt": "c",
    "evaluation/x/metrics.json": "{}",
    "nested/deep/a": "a",
    "theirs/multirun.yaml": "hydra: {}",
    "theirs/0/result": "r",
    "theirs/0/config.yaml": "c",
    "theirs/config.yaml": "c",
    "notes.log": "n",
    "good.trec": "q1 Q0 d1 1 2.0 t\n",
    "broken.txt": "q1 0\n",
    "qrels.txt": "q1 0 d1 1\n",
}
HERE = "hydra.run.dir=."
EVALUATE = ["evaluate.py", "run=good.trec", "qrels=qrels.txt"]
# name -> command line, and part of its error
REFUSED = {
    "train": (
        ["train.py", "encoder=tiny", "data=files", "data.path=/nonexistent", HERE],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "evaluate": (
        ["evaluate.py", "run=good.trec", "qrels=broken.txt", HERE],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "evaluate well": ([*EVALUATE, HERE], "hydra.run.dir: expected a new or an empty folder"),
    "search": (
        ["search.py", "model=bm25", "data=files", "data.path=.", HERE],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "probe": (
        ["probe.py", "encoder=tiny", "data=files", "data.path=.", "probe=tf", HERE],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "a subfolder": ([*EVALUATE, "hydra.run.dir=nested"], "hydra.run.dir: expected a new or an empty folder, got"),
    "a file": (
        [*EVALUATE, "hydra.run.dir=thesis.tex"],
        "hydra.run.dir: expected a new or an empty folder, got the file",
    ),
    "unknown key": ([*EVALUATE, "+foo=1", HERE], "hydra.run.dir: expected a new or an empty folder"),
    "sweep": (
        ["train.py", "-m", "seed=-1,-2", "hydra.sweep.dir=."],
        "hydra.sweep.dir: expected a new or an empty folder",
    ),
    "dry sweep": (
        ["train.py", "-m", "seed=1,2", "hydra.sweep.dir=.", "hydra/launcher=dry_run"],
        "hydra.sweep.dir: expected a new or an empty",
    ),
    "Optuna": (
        ["train.py", "-m", "sweep=optuna_monobert", "hydra.sweep.dir=nested"],
        "hydra.sweep.dir: expected a new or an empty folder",
    ),
    "Optuna over another program's": (
        ["train.py", "-m", "sweep=optuna_monobert", "hydra.sweep.dir=theirs"],
        "hydra.sweep.dir: expected a new or",
    ),
    "above the sweep": (
        ["train.py", "-m", "seed=-1,-2", "hydra.sweep.dir=new", "hydra.sweep.subdir=../nested"],
        "hydra.sweep.subdir: expected",
    ),
    "Hydra's copies of the configuration": (
        [*EVALUATE, HERE, "hydra.output_subdir=theirs"],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "Hydra's log": (
        [
            *EVALUATE,
            HERE,
            "hydra/job_logging=default",
            "hydra.job.name=notes",
            "+hydra.job_logging.handlers.file.mode=w",
        ],
        "hydra.run.dir: expected a new or an empty folder",
    ),
    "Hydra's copies above the sweep": (
        ["train.py", "-m", "seed=-1", "hydra.sweep.dir=new", "hydra.sweep.subdir=../theirs", "hydra.output_subdir=0"],
        "hydra.sweep.subdir: expected a folder inside hydra.sweep.dir, got '../theirs'",
    ),
    "without the check of folders": (
        ["train.py", "-m", "seed=-1", "hydra.sweep.dir=theirs", "~hydra.callbacks.sweep"],
        "hydra.callbacks: expected hydra_plugins.ranker_sweeps.SweepFolder among them",
    ),
    "mistake in an empty folder": (
        ["evaluate.py", "run=good.trec", "qrels=broken.txt", "hydra.run.dir=empty"],
        "broken.txt:1: expected 4 columns",
    ),
    "mistake in a new folder": (
        ["evaluate.py", "run=good.trec", "qrels=broken.txt", "hydra.run.dir=new/run"],
        "broken.txt:1: expected 4 columns",
    ),
    "late mistake in an empty folder": (
        ["train.py", *TINY, "data=files", "data.path=/nonexistent", "hydra.run.dir=empty"],
        "/nonexistent",
    ),
}


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def refused(forks, tmp_path_factory):
    """A folder with user files, and the results of all commands of `REFUSED` in it, run in one process."""
    where = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    (where / "empty").mkdir()
    return where, run_all({name: command for name, (command, _) in REFUSED.items()}, where, forks=forks)


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_folder_of_the_user_s_stays_as_it_is(refused, name):
    done = refused[1][name]
    assert done["code"] == 1, done["out"]
    assert REFUSED[name][1] in done["err"]
    assert "Traceback" not in done["out"]
    assert not [path for path in done["left"] if not path.startswith(("new/", ".cache/"))]


def test_nothing_is_gone_or_changed(refused):
    where = refused[0]
    assert {name: text for name, text in content(where).items() if name in FILES} == FILES
    assert (where / "empty").is_dir() and not list((where / "empty").iterdir())  # the user created it
    assert not (where / "new/run").exists()  # the run created it


@pytest.fixture(scope="module")
def nan(forks, tmp_path_factory, small_files):
    """Trainings whose second step is not finite: a single run, and two jobs of a sweep."""
    where = tmp_path_factory.mktemp("nan")
    choices = [*TINY, "data=files", f"data.path={small_files}", "trainer.max_epochs=1", "optim.lr=1e30"]
    commands = {"single": ["train.py", *choices, "hydra.run.dir=single"],
                "sweep": ["train.py", "-m", *choices, "logger=wandb", "seed=0,1", "hydra.sweep.dir=sweep"]}  # fmt: skip
    return where, run_all(commands, where, forks=forks)


def test_pc2_07_what_the_error_points_at_is_kept(nan):
    where, results = nan
    assert results["single"]["code"] == 1
    dump = where / "single/nonfinite/step-1"
    assert f"python -m ranker replay {dump} repeats it" in results["single"]["err"]
    assert {path.name for path in dump.iterdir()} >= {"dump.json", "weights.safetensors", "config.yaml"}
    assert {path.name for path in (where / "single").iterdir()} == {
        "config.yaml", "checksums.json", "environment.json", "train.log", "nonfinite"
    }  # fmt: skip


def test_pc2_07_the_failed_jobs_of_a_sweep_are_on_the_dashboard(nan):
    where, results = nan
    assert results["sweep"]["code"] == 1
    for job in "01":
        folder = where / "sweep" / job
        assert json.loads((folder / "job.json").read_text())["status"] == "failed"
        assert (folder / "nonfinite/step-1/dump.json").is_file()
        assert (folder / "config.yaml").is_file()
        (offline,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert offline.stat().st_size > 0
        assert "expected a finite loss" in (folder / "train.log").read_text()


@pytest.fixture(scope="module")
def moved(forks, tmp_path_factory, small_files):
    """A training with relative paths, and commands that use its run folder from another folder."""
    where = tmp_path_factory.mktemp("relative")
    (where / "elsewhere").mkdir()
    (where / "coll").symlink_to(small_files)
    choices = [
        *TINY,
        "data=files",
        "data.path=coll",
        "data.random_negatives=true",
        "name=relative",
        "hydra.run.dir=RUN",
        "trainer.max_steps=2",
        "+callbacks.kept={_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: kept, "
        "every_n_train_steps: 1, filename: step}",
    ]
    first = run_all({"train": ["train.py", *choices]}, where, forks=forks)
    assert first["train"]["code"] == 0, first["train"]["out"]
    commands = {
        "evaluate": [
            "evaluate.py",
            "checkpoint=../RUN",
            "trainer.enable_progress_bar=false",
            "hydra.run.dir=evaluated",
        ],
        "model": [
            "evaluate.py",
            "checkpoint=../RUN/model",
            "trainer.enable_progress_bar=false",
            "hydra.run.dir=model-evaluated",
        ],
        "resume": ["train.py", "checkpoint=../RUN", "resume=true", "trainer.max_steps=3", "hydra.run.dir=resumed"],
    }
    return where, run_all(commands, where / "elsewhere", forks=forks)


@pytest.mark.parametrize("name", ["evaluate", "model", "resume"])
def test_pc2_17_a_run_s_data_is_found_from_any_folder(moved, name):
    where, results = moved
    assert results[name]["code"] == 0, results[name]["out"]
    folder = {"evaluate": "evaluated", "model": "model-evaluated", "resume": "resumed"}[name]
    measures = json.loads(next((where / "elsewhere" / folder).glob("evaluation/*/metrics.json")).read_text())[
        "measures"
    ]
    trained = json.loads(next((where / "RUN").glob("evaluation/*/metrics.json")).read_text())["measures"]
    if name != "resume":
        assert measures == trained


def test_callbacks_write_in_the_run_s_folder(moved):
    where = moved[0]
    assert list((where / "RUN/kept").iterdir()) and list((where / "elsewhere/resumed/kept").iterdir())
    assert not (where / "kept").exists() and not (where / "elsewhere/kept").exists()


def test_pc2_17_every_path_in_a_run_folder_is_absolute(moved):
    where = moved[0]
    for file in ("RUN/config.yaml", "RUN/model/ranker.yaml", "elsewhere/resumed/config.yaml"):
        cfg = OmegaConf.load(where / file)
        assert cfg.data.path == str(where / "coll")
    assert OmegaConf.load(where / "elsewhere/resumed/config.yaml").checkpoint == str(where / "RUN")
    # a stored file can't set the cache folder
    assert OmegaConf.load(where / "elsewhere/resumed/config.yaml").cache_dir == str(where / "elsewhere/.cache")


def test_resuming_somebody_s_run_runs_none_of_their_code(tmp_path):
    trace = tmp_path / "ran"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    handler = f"{{(): os.system, command: touch {trace}}}"
    logging = f"job_logging: {{version: 1, handlers: {{x: {handler}}}, root: {{handlers: [x]}}}}\n"
    (theirs / "config.yaml").write_text(
        "name: theirs\ntrainer: {max_epochs: 1, devices: 2, accelerator: cpu}\n" + logging
    )
    done = run("train.py", f"checkpoint={theirs}", "resume=true", cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: {theirs / 'config.yaml'}: job_logging: unknown key" in done.stderr
    (theirs / "config.yaml").write_text(f"hydra: {{{logging.strip()}}}\n")
    done = run("train.py", "--config-path", str(theirs), "--config-name", "config", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: hydra.job_logging.handlers.x.(): expected one of logging.StreamHandler" in done.stderr
    assert not trace.exists()
    assert os.fspath(ROOT) not in done.stderr.split("error: ")[0]  # no traceback
