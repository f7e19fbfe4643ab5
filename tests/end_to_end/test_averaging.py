"""`callbacks=ema`: the stored weights are the exponential moving average of the trained ones, also after a kill."""

import pytest
import torch
from commands import run_folder
from safetensors.torch import load_file

DECAY = 0.9
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
    "callbacks=ema",
    f"callbacks.ema.decay={DECAY}",
]


@pytest.fixture(scope="module")
def runs(forks, small_files, tmp_path_factory):
    """A whole run of three steps, a run killed as it writes the second step, and its resumed run."""
    folders = [tmp_path_factory.mktemp(name) for name in ("whole", "killed", "resumed")]
    choices = [*CHOICES, f"data.path={small_files}", f"cache_dir={folders[0] / 'cache'}"]
    assert forks.run("train.py", *choices, cwd=folders[0]).code == 0
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 2, 0.0]
    assert forks.run("train.py", *choices, cwd=folders[1], signals=[kill]).code == -9
    killed = run_folder(folders[1])
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=folders[2])
    assert done.code == 0, done.out
    return run_folder(folders[0]), killed, run_folder(folders[2])


def stored(run, name="last"):
    return torch.load(run / f"checkpoints/{name}.ckpt", map_location="cpu", weights_only=True)


def test_the_average_follows_its_recurrence(runs):
    """The average of the first step is its weights; then average = decay * average + (1 - decay) * weights."""
    whole, killed, _ = runs
    steps = [stored(killed), stored(whole, "previous"), stored(whole)]
    assert [step["global_step"] for step in steps] == [1, 2, 3]
    moved = 0.0
    for name, weights in steps[0]["current_model_state"].items():
        expected = weights.double()
        for step in steps:
            if step is not steps[0]:
                expected = DECAY * expected + (1 - DECAY) * step["current_model_state"][name].double()
            torch.testing.assert_close(step["state_dict"][name].double(), expected, rtol=1e-6, atol=1e-7)
        moved = max(moved, float((steps[2]["current_model_state"][name].double() - expected).abs().max()))
    assert moved > 1e-3  # the average is not the last weights


def test_the_exported_model_is_the_average(runs):
    exported = load_file(runs[0] / "model/model.safetensors")
    best = stored(runs[0], "best")
    name = "encoder.layer.0.attention.self.query.weight"
    (weight,) = [value for key, value in exported.items() if key.endswith(name)]
    assert torch.equal(weight, best["state_dict"]["scorer.encoder.model." + name])
    assert not torch.equal(weight, best["current_model_state"]["scorer.encoder.model." + name])


def test_a_killed_run_resumes_to_the_same_average(runs):
    whole, _, resumed = runs
    one, other = stored(whole), stored(resumed)
    for part in ("state_dict", "current_model_state", "averaging_state"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(one[part][name], other[part][name]) for name in one[part]), part
