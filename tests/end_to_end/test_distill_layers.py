"""`distill=layers`: a student of one layer learns from a run's two layers; a killed run resumes to the same bits."""

import pytest
import torch
from commands import run_folder

CHOICES = [
    "encoder=tiny",
    "encoder.dropout=0.1",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_steps=3",
    "trainer.val_check_interval=3",
    "schedule=constant",
    "optim.lr=1e-2",
    "depth=5",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
]


@pytest.fixture(scope="module")
def runs(forks, small_files, tmp_path_factory):
    """A teacher; a whole training of a student, one killed as it writes the second step, and its resumed run."""
    folders = [tmp_path_factory.mktemp(name) for name in ("teacher", "whole", "killed", "resumed")]
    choices = [*CHOICES, f"data.path={small_files}", f"cache_dir={folders[0] / 'cache'}"]
    assert forks.run("train.py", *choices, cwd=folders[0]).code == 0
    teacher = run_folder(folders[0])
    choices += ["distill=layers", f"distill.teacher={teacher}", "encoder.layers=1"]
    done = forks.run("train.py", *choices, cwd=folders[1])
    assert done.code == 0, done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 2, 0.0]
    assert forks.run("train.py", *choices, cwd=folders[2], signals=[kill]).code == -9
    done = forks.run("train.py", f"checkpoint={run_folder(folders[2])}", "resume=true", cwd=folders[3])
    assert done.code == 0, done.out
    return teacher, run_folder(folders[1]), run_folder(folders[3])


def weights(run, name="last"):
    return torch.load(run / f"checkpoints/{name}.ckpt", map_location="cpu", weights_only=True)["state_dict"]


def test_the_student_learns_from_the_teacher(runs):
    teacher, whole, _ = runs
    log = (whole / "train.log").read_text()
    assert "the student's layers learn from layers [2] of the teacher" in log
    name = "scorer.encoder.model.encoder.layer.0.attention.self.query.weight"
    own, first, second = (
        weights(whole)[name],
        weights(teacher, "best")[name],
        weights(teacher, "best")[name.replace("layer.0", "layer.1")],
    )
    assert (own - second).abs().max() < 0.05 < (own - first).abs().max()  # it started from the second layer
    assert not any("layer.1." in name for name in weights(whole))


def test_a_killed_run_resumes_to_the_same_weights(runs):
    one, other = weights(runs[1]), weights(runs[2])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        (["distill.teacher=nowhere"], "distill.teacher: expected a file or folder"),
        (["distill.teacher=.", "distill.attention=1"], "distill.attention: expected 0, or encoder.ragged=false"),
        (["distill.teacher=.", "model=dpr"], "distill: expected none, or model=monobert, got DPR"),
        (["distill.teacher=.", "distill.layers=lst"], "distill.layers: expected one of uniform, last, auto; got 'lst'"),
    ],
)
def test_what_does_not_fit_is_one_line(forks, tmp_path, choices, line):
    done = forks.run("train.py", "encoder=tiny", "distill=layers", *choices, cwd=tmp_path)
    assert done.code == 1 and line in done.out
    assert not list(tmp_path.glob("outputs/*/*/[!.]*"))
