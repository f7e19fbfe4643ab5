"""A training that is killed at any moment resumes with the same losses and bit-identical weights, with dropout on."""

import csv
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from commands import by_start, run_folder
from safetensors.torch import load_file

from ranker.files.checksums import write_sums
from ranker.training.checkpoint_files import fault

CHOICES = [
    "encoder=tiny",
    "encoder.dropout=0.1",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_epochs=4",
    "optim.lr=3e-3",
    "depth=5",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
    "name=killed",
]
STEPS = 24
TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]


def losses(*folders: Path) -> dict[int, str]:
    """Step -> loss from the metrics files of a run and of the runs that it resumes."""
    logged: dict[int, str] = {}
    for folder in folders:
        with (folder / "metrics.csv").open() as lines:
            for row in csv.DictReader(lines):
                if row.get("train/loss"):
                    assert logged.setdefault(int(row["step"]), row["train/loss"]) == row["train/loss"]
    return logged


def state(folder: Path) -> dict:
    return torch.load(folder / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)


def flat(value, path=""):
    """Path -> leaf of a nested state."""
    if isinstance(value, dict):
        return {key: leaf for name, part in value.items() for key, leaf in flat(part, f"{path}/{name}").items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for i, part in enumerate(value) for key, leaf in flat(part, f"{path}/{i}").items()}
    return {path: value}


def assert_same_end(one: Path, other: Path) -> None:
    """Both runs have the same exported weights, training state and best value."""
    weights = [load_file(folder / "model/model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        leaves = [flat(state(folder)[part]) for folder in (one, other)]
        assert leaves[0].keys() == leaves[1].keys()
        for key, leaf in leaves[0].items():
            assert torch.equal(leaf, leaves[1][key]) if isinstance(leaf, torch.Tensor) else leaf == leaves[1][key], key
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert all(results[0][key] == results[1][key] for key in ("objective", "best_step", "steps", "measures"))


@pytest.fixture(scope="module")
def whole(forks, small_files, tmp_path_factory):
    """The uninterrupted run, and the cache folder that all runs share."""
    where = tmp_path_factory.mktemp("whole")
    done = forks.run("train.py", *CHOICES, f"data.path={small_files}", f"cache_dir={where / 'cache'}", cwd=where)
    assert done.code == 0, done.out
    return run_folder(where), where / "cache"


@pytest.fixture
def choices(whole, small_files):
    return [*CHOICES, f"data.path={small_files}", f"cache_dir={whole[1]}"]


def test_pc71_killed_at_nine_moments(forks, whole, choices, tmp_path):
    rng = random.Random(11)
    folders: list[Path] = []
    arguments = choices
    # as a checkpoint is opened or renamed, while it is written (open for a millisecond), in a step or in a validation
    late = (lambda: 0.0, lambda: rng.uniform(0, 0.002), lambda: rng.uniform(0, 0.06))
    for event, moment in itertools.product(("open", "os.rename", "open"), late):
        kill = [0, 0, "SIGKILL", event, ".last.ckpt.partial", rng.randint(1, 3), moment()]
        done = forks.run("train.py", *arguments, cwd=tmp_path, signals=[kill])
        assert done.code == -9, done.out
        folders = by_start(tmp_path / "outputs/killed")
        # a resumed run that is killed as it begins has the earlier best.ckpt, and no checkpoint of its own yet
        kept = [folder for folder in folders if (folder / "checkpoints/last.ckpt").exists()]
        if kept:
            assert fault(kept[-1] / "checkpoints/last.ckpt") is None
            arguments = [f"checkpoint={kept[-1]}", "resume=true"]
    done = forks.run("train.py", *arguments, cwd=tmp_path)
    assert done.code == 0, done.out
    folders = by_start(tmp_path / "outputs/killed")
    assert_same_end(whole[0], folders[-1])
    logged = [folder for folder in folders if (folder / "metrics.csv").is_file()]
    assert losses(*logged) == losses(whole[0])  # nothing is lost: the loss of each step is in one of the files
    assert len(losses(whole[0])) == STEPS
    assert len(losses(folders[-1])) < STEPS - 5  # the kills took effect


def test_pc71_killed_in_a_validation(forks, whole, choices, tmp_path):
    done = forks.run("tests/end_to_end/killed_in_validation.py", *choices, cwd=tmp_path)
    assert done.code == -9, done.out
    killed = run_folder(tmp_path)
    assert state(killed)["global_step"] == 11  # the checkpoint of step 12 waits for its validation
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=tmp_path)
    assert done.code == 0, done.out
    last = by_start(tmp_path / "outputs/killed")[-1]
    assert_same_end(whole[0], last)
    assert losses(killed, last) == losses(whole[0])


def test_pc71_pc77_two_processes_go_on_exactly(forks, choices, tmp_path):
    """One process is killed, which ends the other; then one gets SIGTERM; the third run ends like a whole one."""
    whole, first, second, third = (tmp_path / name for name in ("whole", "first", "second", "third"))
    for folder in (whole, first, second, third):
        folder.mkdir()
    short = [*choices, *TWO, "trainer.max_epochs=2"]
    done = forks.run("train.py", *short, cwd=whole, devices=2)
    assert done.codes == [0, 0], done.out
    kill = [0, 1, "SIGKILL", "open", ".last.ckpt.partial", 4, 0.005]
    done = forks.run("train.py", *short, cwd=first, devices=2, signals=[kill])
    assert done.seconds < 60
    assert done.codes == [1, -9]
    assert done.out.count("error: another process of this run has ended") == 1
    assert "Traceback" not in done.out
    killed = run_folder(first)
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*") if path.is_file()}
    stop = [0, 1, "SIGTERM", "open", ".last.ckpt.partial", 3, 0.0]
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=second, devices=2, signals=[stop])
    assert done.codes == [75, 75], done.out
    stopped = run_folder(second)
    (error,) = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert error == (
        f"error: stopped by SIGTERM after step {state(stopped)['global_step']}, which is saved; "
        f"go on with python train.py checkpoint={stopped} resume=true"
    )
    assert state(stopped)["global_step"] < 12
    assert {path: path.stat().st_mtime_ns for path in killed.rglob("*") if path.is_file()} == before
    done = forks.run("train.py", f"checkpoint={stopped}", "resume=true", cwd=third, devices=2)
    assert done.codes == [0, 0], done.out
    assert_same_end(run_folder(whole), run_folder(third))
    assert losses(killed, stopped, run_folder(third)) == losses(run_folder(whole))


def test_sigterm_and_two_processes_that_resume_a_run_of_one(forks, choices, tmp_path):
    """SIGTERM ends a test at once and a training after its step; a change of devices changes only rounding."""
    plain = [*choices, "optim=sgd", "optim.lr=0.05", "trainer.max_epochs=2"]
    folders = [tmp_path / name for name in ("whole", "stopped", "resumed")]
    for folder in folders:
        folder.mkdir()
    done = forks.run("train.py", *plain, cwd=folders[0], signals=[[0, 0, "SIGTERM", "open", "run.trec", 1, 0.0]])
    assert done.code == 75, done.out
    whole = run_folder(folders[0])
    assert "error: stopped by SIGTERM after step 12, which is saved" in done.out
    assert (whole / "model/model.safetensors").is_file() and not (whole / "result.json").exists()
    assert not list((whole / "evaluation").rglob("metrics.json"))
    done = forks.run(
        "train.py", *plain, cwd=folders[1], signals=[[0, 0, "SIGTERM", "open", ".last.ckpt.partial", 4, 0.0]]
    )
    assert done.code == 75, done.out
    stopped = run_folder(folders[1])
    assert 4 <= state(stopped)["global_step"] < 12
    done = forks.run("train.py", f"checkpoint={stopped}", "resume=true", *TWO, cwd=folders[2], devices=2)
    assert done.codes == [0, 0], done.out
    expected, got = losses(whole), losses(stopped, run_folder(folders[2]))
    assert expected.keys() == got.keys() == set(range(12))
    assert [float(got[step]) for step in range(12)] == pytest.approx(
        [float(expected[step]) for step in range(12)], abs=1e-6
    )
    assert len(set(expected.values())) == 12  # the training does change the weights
    for key, weight in state(whole)["state_dict"].items():
        torch.testing.assert_close(state(run_folder(folders[2]))["state_dict"][key], weight, rtol=0, atol=1e-6)


def test_more_steps_than_the_first_run_had(forks, choices, tmp_path):
    for name, steps in (("long", 10), ("short", 4)):
        (tmp_path / name).mkdir()
        done = forks.run("train.py", *choices, "schedule=constant", f"trainer.max_steps={steps}", cwd=tmp_path / name)
        assert done.code == 0, done.out
    long, short = (run_folder(tmp_path / name) for name in ("long", "short"))
    assert json.loads((short / "result.json").read_text())["best_step"] == 4  # validated though its epoch has 6 steps
    done = forks.run("train.py", f"checkpoint={short}", "resume=true", "trainer.max_steps=10", cwd=tmp_path / "short")
    assert done.code == 0, done.out
    assert "the learning rate of step" not in done.out
    # the new folder is beside the resumed run, not under the default name
    (resumed,) = set((tmp_path / "short/outputs/killed").iterdir()) - {short}
    assert losses(short, resumed) == losses(long)
    assert all(
        torch.equal(state(long)["state_dict"][key], value) for key, value in state(resumed)["state_dict"].items()
    )


def test_the_rate_of_a_longer_schedule_is_its_own(forks, choices, tmp_path):
    rates = {}
    for name, steps in (("long", 8), ("short", 4)):
        (tmp_path / name).mkdir()
        done = forks.run("train.py", *choices, "schedule.warmup=0", f"trainer.max_steps={steps}", cwd=tmp_path / name)
        assert done.code == 0, done.out
    short = run_folder(tmp_path / "short")
    done = forks.run(
        "train.py", f"checkpoint={short}", "resume=true", "trainer.max_steps=8", "name=longer", cwd=tmp_path / "short"
    )
    assert done.code == 0, done.out
    # after 4 of 8 steps; the schedule over 4 steps had reached its end
    assert (
        "the learning rate of step 5 is 0.0015, but 0 in the checkpoint: the earlier run had another schedule or "
        "another number of steps" in done.out
    )
    for name, folder in (
        ("long", run_folder(tmp_path / "long")),
        ("resumed", next((tmp_path / "short/outputs/longer").iterdir())),
    ):
        with (folder / "metrics.csv").open() as lines:
            rates[name] = {int(row["step"]): row["optim/lr"] for row in csv.DictReader(lines) if row.get("optim/lr")}
    assert {step: rate for step, rate in rates["resumed"].items() if step >= 4} == {
        s: r for s, r in rates["long"].items() if s >= 4
    }


def test_a_broken_checkpoint_is_named_and_the_one_before_serves(forks, whole, choices, tmp_path):
    done = forks.run(
        "train.py", *choices, cwd=tmp_path, signals=[[0, 0, "SIGKILL", "open", ".last.ckpt.partial", 9, 0.0]]
    )
    assert done.code == -9
    killed = run_folder(tmp_path)
    last, previous = (killed / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt"))
    last.write_bytes(last.read_bytes()[:5000])
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", "name=again", cwd=tmp_path)
    assert done.code == 0, done.out
    (line,) = [line for line in done.out.splitlines() if "going on from" in line]
    assert line.startswith(f"{last}: expected a whole checkpoint, got a broken one of 5000 bytes") and line.endswith(
        f"going on from {previous}"
    )
    assert_same_end(whole[0], next((tmp_path / "outputs/again").iterdir()))
    previous.write_bytes(b"")
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=tmp_path)
    assert done.code == 1
    assert len([line for line in done.out.splitlines() if line.startswith("error: ")]) == 1
    assert f"{previous}: expected a whole checkpoint, got a broken one of 0 bytes" in done.out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.queries=8", "batch.queries: expected the value of the run that is resumed, got 'batch.queries=8'"),
        ("seed=1", "seed: expected the value of the run that is resumed, got 'seed=1'"),
    ],
)
def test_what_a_resumed_run_can_not_change(forks, whole, tmp_path, override, message):
    done = forks.run("train.py", f"checkpoint={whole[0]}", "resume=true", override, cwd=tmp_path)
    assert done.code == 1
    assert done.out.startswith(f"error: {message}")
    assert len(done.out.splitlines()) == 1


def test_files_that_were_edited_are_another_training(forks, whole, small_files, tmp_path):
    run, files = shutil.copytree(whole[0], tmp_path / "run"), shutil.copytree(small_files, tmp_path / "files")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(small_files), str(files)))
    write_sums(run, ["config.yaml"])
    with (files / "qrels.train.txt").open("a") as lines:
        lines.write("q0 0 d1 1\n")
    done = forks.run("train.py", f"checkpoint={run}", "resume=true", "trainer.max_epochs=5", cwd=tmp_path)
    assert done.code == 1
    (error,) = [line for line in done.out.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert error.startswith(
        "error: data: expected the training data of the run that is resumed, "
        "got other (a fingerprint of queries, docs and"
    )


def test_pc76_checkpoint_names_hold_no_measure(whole):
    assert sorted(path.name for path in (whole[0] / "checkpoints").rglob("*")) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    ]
