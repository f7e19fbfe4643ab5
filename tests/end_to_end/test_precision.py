"""An automatically chosen precision is stored, and a resumed run keeps it; one that the CPU lacks is refused."""

import json
from itertools import product

import pytest
from commands import by_start, run_folder
from omegaconf import OmegaConf
from test_resume import assert_same_end, losses

from ranker.assembly.precision import cpu_has_bf16

CHOICES = [
    "encoder=tiny",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_epochs=2",
    "optim.lr=3e-3",
    "depth=5",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
    "name=precise",
]
IMITATED = ("tests/end_to_end/imitated_bf16.py", "train.py")


def stored(folder):
    """The precision in the configuration, and its entry in environment.json."""
    environment = json.loads((folder / "environment.json").read_text())
    return OmegaConf.load(folder / "config.yaml").trainer.precision, environment["precision"]


@pytest.fixture
def choices(small_files, tmp_path):
    return [*CHOICES, f"data.path={small_files}", f"cache_dir={tmp_path / 'cache'}"]


def test_a_resumed_run_keeps_bf16_and_ends_like_a_whole_one(forks, choices, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    done = forks.run(*IMITATED, *choices, cwd=whole)
    assert done.code == 0, done.out
    value, entry = stored(run_folder(whole))
    assert value == entry["value"] == "bf16-mixed"
    assert entry["reason"].startswith("a layer's products take ")
    assert f"precision: bf16-mixed ({entry['reason']})" in (run_folder(whole) / "train.log").read_text()
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 5, 0.0]
    assert forks.run(*IMITATED, *choices, cwd=killed, signals=[kill]).code == -9
    first = run_folder(killed)
    done = forks.run(*IMITATED, f"checkpoint={first}", "resume=true", cwd=killed)
    assert done.code == 0, done.out
    last = by_start(killed / "outputs/precise")[-1]
    assert stored(last) == ("bf16-mixed", {"value": "bf16-mixed", "reason": "configured"})
    assert_same_end(run_folder(whole), last)
    assert losses(first, last) == losses(run_folder(whole))
    # the same training in float32 has other losses: bf16 was computed
    done = forks.run("train.py", *choices, "trainer.precision=32-true", cwd=tmp_path)
    assert done.code == 0, done.out
    exact, half = losses(run_folder(tmp_path)), losses(run_folder(whole))
    assert exact != half
    assert [float(half[step]) for step in range(4)] == pytest.approx(
        [float(exact[step]) for step in range(4)], abs=0.02
    )
    if not cpu_has_bf16():  # the stored choice is not changed silently
        done = forks.run("train.py", f"checkpoint={first}", "resume=true", cwd=killed)
        assert done.code == 1
        (error,) = [line for line in done.out.splitlines() if line.startswith("error: ")]
        assert "trainer.precision: expected 32-true, because this CPU has no bfloat16" in error
        done = forks.run("train.py", f"checkpoint={first}", "resume=true", "trainer.precision=32-true", cwd=killed)
        assert done.code == 0, done.out


def test_an_evaluation_in_bf16_has_the_scores_and_the_order_of_float32(forks, choices, tmp_path):
    done = forks.run(
        "train.py", *choices, "trainer.max_epochs=10", "optim.lr=1e-2", "save_every_steps=60", cwd=tmp_path
    )
    assert done.code == 0, done.out
    trained = run_folder(tmp_path)
    scores = {}
    for name, script in (("32-true", ["evaluate.py"]), ("bf16-mixed", [IMITATED[0], "evaluate.py"])):
        where = tmp_path / name
        where.mkdir()
        done = forks.run(*script, f"checkpoint={trained}", f"trainer.precision={name}", "report=none", cwd=where)
        assert done.code == 0, done.out
        assert stored(run_folder(where)) == (name, {"value": name, "reason": "configured"})
        (run,) = (run_folder(where) / "evaluation").glob("*/run.trec")
        scores[name] = {tuple(row.split()[:3:2]): float(row.split()[4]) for row in run.read_text().splitlines()}
    exact, half = scores["32-true"], scores["bf16-mixed"]
    assert exact != half
    assert half == pytest.approx(exact, abs=1e-2)
    clear = [
        (one, other)
        for one, other in product(exact, repeat=2)
        if one[0] == other[0] and exact[one] > exact[other] + 2e-2
    ]
    assert len(clear) >= 10
    assert all(half[one] > half[other] for one, other in clear)


def test_small_encoders_stay_in_float32_on_every_cpu(forks, choices, tmp_path):
    done = forks.run("train.py", *choices, cwd=tmp_path)
    assert done.code == 0, done.out
    value, entry = stored(run_folder(tmp_path))
    assert value == entry["value"] == "32-true"
    assert "bfloat16" in entry["reason"]


@pytest.mark.skipif(cpu_has_bf16(), reason="this CPU has bfloat16, so nothing is refused")
def test_bf16_is_refused_in_one_line_where_the_cpu_has_none(forks, choices, tmp_path):
    done = forks.run("train.py", *choices, "trainer.precision=bf16-mixed", cwd=tmp_path)
    assert done.code == 1
    (line,) = done.out.splitlines()
    assert line.startswith("error: trainer.precision: expected 32-true, because this CPU has no bfloat16 arithmetic")
