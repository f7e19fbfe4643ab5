"""`trainer.strategy=fsdp`: two processes with shards equal one without, and resume each other's checkpoints."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from commands import run_folder
from safetensors.torch import load_file

from ranker.training.checkpoint_files import read_checkpoint

SCRIPT = Path(__file__).with_name("sharded_run.py")
spec = importlib.util.spec_from_file_location("sharded_run", SCRIPT)
sharded_run = importlib.util.module_from_spec(spec)
sys.modules["sharded_run"] = sharded_run
spec.loader.exec_module(sharded_run)

JOBS = {
    "monobert": {},
    "monobert, fused": {"optimizer": "fused"},
    "lm": {"model": "lm"},
    "lm, checkpointing": {"model": "lm", "checkpointing": True},
}
SPLIT = {"devices": 2, "max_tokens": 420}  # several micro-batches a step


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(cache):
    return {name: sharded_run.train(sharded_run.Job(str(cache), **options)) for name, options in JOBS.items()}


@pytest.fixture(scope="module")
def together(forks, cache):
    jobs = {name: {"cache": str(cache), **SPLIT, **options} for name, options in JOBS.items()}
    jobs["clip"] = {**jobs["monobert"], "fault": "clip"}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    done = forks.run("tests/end_to_end/sharded_run.py", "jobs.json", "results.pt", cwd=cache, devices=2, timeout=200)
    assert done.codes == [0, 0], done.out
    return torch.load(cache / "results.pt", weights_only=True)


def furthest(one, other):
    assert one["weights"].keys() == other["weights"].keys()
    return max((one["weights"][key] - other["weights"][key]).abs().max().item() for key in one["weights"])


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_with_shards_equal_one_without(alone, together, name):
    assert together[name]["sharded"] > 20
    assert alone[name]["sharded"] == 0
    assert together[name]["losses"] == pytest.approx(alone[name]["losses"], rel=0, abs=1e-12)
    assert furthest(together[name], alone[name]) < 1e-9
    assert together[name]["val"] == pytest.approx(alone[name]["val"], abs=1e-12)


def test_each_unit_is_gathered_once_and_reduced_once_a_step(together):
    for name in JOBS:
        units = 3  # two layers and the rest
        assert together[name]["counts"] == 6 * [{"foreach_all_gather": units, "foreach_reduce": units}], name


def test_a_missing_clipping_is_seen(alone, together):
    assert furthest(together["clip"], alone["monobert"]) > 1e-6


CHOICES = [
    "model=lm_reranker", "encoder=tiny_lm", "model.prompt='{query} {doc} ?'", "data=files", "batch.queries=4",
    "batch.docs=4", "trainer.max_epochs=2", "trainer.strategy=fsdp", "optim=sgd", "optim.momentum=0.9", "depth=5",
    "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "save_every_steps=1", "name=killed", "report=none",
]  # fmt: skip


def test_a_killed_run_resumes_to_the_bit_with_shards_and_near_it_without(forks, small_files, tmp_path):
    common = [f"data.path={small_files}", f"cache_dir={tmp_path / 'cache'}"]
    folders = {name: tmp_path / name for name in ("whole", "killed", "resumed", "one")}
    for folder in folders.values():
        folder.mkdir()
    done = forks.run("train.py", *CHOICES, *common, "trainer.devices=2", cwd=folders["whole"], devices=2)
    assert done.codes == [0, 0], done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.new.partial", 5, 0.0]
    other = [0, 1, "SIGKILL", "open", ".last.ckpt.new.partial", 5, 0.0]
    parts = ["trainer.devices=2", "sharded_checkpoints=true"]
    done = forks.run("train.py", *CHOICES, *common, *parts, cwd=folders["killed"], devices=2, signals=[other, kill])
    assert done.codes[0] == -9, done.out
    killed = run_folder(folders["killed"])
    stored = [torch.load(killed / "checkpoints" / f"last.ckpt{part}", weights_only=True) for part in ("", ".1")]
    name = "scorer.encoder.model.layers.0.mlp.up_proj.weight"  # [64, 32] of a tiny Llama
    assert [part["state_dict"][name].shape for part in stored] == [(32, 32), (32, 32)]
    assert read_checkpoint(killed / "checkpoints/last.ckpt")["state_dict"][name].shape == (64, 32)
    assert stored[0]["global_step"] == 4
    resume = [f"checkpoint={killed}", "resume=true", "sharded_checkpoints=false", common[1]]
    done = forks.run("train.py", *resume, "trainer.devices=2", cwd=folders["resumed"], devices=2)
    assert done.codes == [0, 0], done.out
    done = forks.run("train.py", *resume, "trainer.devices=1", cwd=folders["one"])
    assert done.code == 0, done.out
    ends = {
        name: torch.load(run_folder(folders[name]) / "checkpoints/last.ckpt", weights_only=True)
        for name in ("whole", "resumed", "one")
    }
    for part in ("state_dict", "optimizer_states"):
        whole, resumed, one = (leaves(ends[name][part]) for name in ("whole", "resumed", "one"))
        assert whole.keys() == resumed.keys() == one.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
        assert max((whole[key] - one[key]).abs().max().item() for key in whole) < 1e-6
    for name in ("whole", "one"):
        weights = load_file(run_folder(folders[name]) / "model/model.safetensors")
        assert len(weights) > 20
    results = [json.loads((run_folder(folders[name]) / "result.json").read_text()) for name in ("whole", "resumed")]
    assert results[0]["measures"] == results[1]["measures"]


def leaves(value, path=""):
    """Path -> tensor of a nested state."""
    if isinstance(value, dict):
        return {key: leaf for name, part in value.items() for key, leaf in leaves(part, f"{path}/{name}").items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for i, part in enumerate(value) for key, leaf in leaves(part, f"{path}/{i}").items()}
    return {path: value} if isinstance(value, torch.Tensor) else {}


@pytest.mark.parametrize(
    ("script", "arguments", "complaint"),
    [
        (
            "train.py",
            ["encoder.graphs=true"],
            "strategy: expected auto or ddp with encoder.graphs=true, got fsdp",
        ),
        ("train.py", ["trainer.precision=64-true"], "expected auto or ddp with trainer.precision=64-true"),
        ("train.py", ["lora=default"], "with adapters"),
        ("train.py", ["model=dpr"], "with texts of a step that are compared"),
        ("train.py", ["model=multitask"], "with model=multitask"),
        ("train.py", ["callbacks=ema"], "with callbacks=ema"),
        ("train.py", ["callbacks=last_k", "model=early_exit"], "with callbacks=last_k"),
        ("train.py", ["encoder.layer_drop=0.1"], "with encoder.layer_drop=0.1"),
        ("train.py", ["loss=mse", "loss.affine=true"], "with loss.affine=true"),
        ("ranker/__main__.py", ["objective=inverse_cloze"], "with objective=inverse_cloze"),
    ],
)
def test_what_does_not_go_together_is_one_line(forks, tmp_path, script, arguments, complaint):
    command = ["pretrain"] if script.endswith("__main__.py") else []
    done = forks.run(script, *command, "encoder=tiny", "trainer.strategy=fsdp", *arguments, cwd=tmp_path)
    assert done.code == 1, done.out
    assert complaint in done.out and "Traceback" not in done.out
