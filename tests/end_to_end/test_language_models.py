"""A language model with adapters is trained, killed, resumed and evaluated; its checkpoints hold the adapters alone."""

import json

import pytest
import torch
from commands import by_start, run_folder
from transformers import LlamaForCausalLM

from ranker.encoders.tiny import tiny_lm_config, tiny_lm_tokenizer

CHOICES = [
    "model=lm_reranker", "encoder=tiny_lm", "encoder.pretrained=true", "lora=default",
    "encoder.lora.dropout=0.1", "encoder.lora.merge=true",
    "data=files", "batch.queries=4", "batch.docs=4", "trainer.max_epochs=2", "optim.lr=3e-3", "depth=5",
    "trainer.enable_progress_bar=false", "report=none", "save_every_steps=1", "name=lm",
    "loss=dpo",
]  # fmt: skip


def state(folder):
    return torch.load(folder / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)


@pytest.fixture(scope="module")
def runs(forks, small_files, tmp_path_factory):
    """A whole run and one that was killed while it wrote a checkpoint, then resumed."""
    where = tmp_path_factory.mktemp("lm")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_lm_config()).save_pretrained(where / "base")
    tiny_lm_tokenizer().save_pretrained(where / "base")
    choices = [*CHOICES, f"encoder.name={where / 'base'}", f"data.path={small_files}", f"cache_dir={where / 'cache'}"]
    for name in ("whole", "killed"):
        (where / name).mkdir()
    done = forks.run("train.py", *choices, cwd=where / "whole")
    assert done.code == 0, done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 5, 0.0]
    done = forks.run("train.py", *choices, cwd=where / "killed", signals=[kill])
    assert done.code == -9, done.out
    killed = run_folder(where / "killed")
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=where / "killed")
    assert done.code == 0, done.out
    return run_folder(where / "whole"), by_start(where / "killed/outputs/lm")[-1]


def test_a_resumed_training_ends_as_a_whole_one(runs):
    whole, resumed = runs
    for part in ("state_dict", "optimizer_states"):
        first, second = (state(run)[part] for run in runs)
        assert repr(first) == repr(second)
    names = state(whole)["state_dict"]
    assert names and all(".lora_" in name or name.startswith("scorer.head.") for name in names)
    assert sum(value.numel() for value in names.values()) < 20_000
    torch.testing.assert_close(names, state(resumed)["state_dict"], rtol=0, atol=0)
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    assert results[0]["measures"] == results[1]["measures"]


def test_the_model_is_evaluated_with_and_without_its_adapters(runs, forks, small_files, tmp_path):
    whole = runs[0]
    files = {path.name for path in (whole / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "prompt.json", "ranker.yaml"} <= files
    assert "model.safetensors" not in files and (whole / "merged/model.safetensors").is_file()
    expected = json.loads((whole / "result.json").read_text())["measures"]
    for name in ("", "model", "merged"):
        where = tmp_path / (name or "run")
        where.mkdir()
        done = forks.run(
            "evaluate.py", f"checkpoint={whole / name}", "data=files", f"data.path={small_files}", "depth=5",
            f"cache_dir={tmp_path / 'cache'}", "report=none", cwd=where,
        )  # fmt: skip
        assert done.code == 0, done.out
        (metrics,) = where.rglob("metrics.json")
        measures = json.loads(metrics.read_text())["measures"]
        assert measures == pytest.approx(next(iter(expected.values())), abs=1e-6)


def test_adapters_on_a_checkpoint_are_refused(runs, forks, small_files, tmp_path):
    done = forks.run(
        "train.py", *CHOICES[6:], "lora=default", f"data.path={small_files}", f"checkpoint={runs[0]}", cwd=tmp_path
    )
    assert done.code == 1 and "error: lora: expected none, since checkpoint=" in done.out
    assert "Traceback" not in done.out
