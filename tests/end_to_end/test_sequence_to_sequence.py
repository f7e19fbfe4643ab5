"""A sequence-to-sequence reranker is trained, killed, resumed and evaluated by its commands."""

import json

import numpy as np
import pytest
import torch
from commands import by_start, run_folder

from ranker import Reranker

CHOICES = [
    "model=mono_t5", "encoder=tiny_t5", "encoder.dropout=0.1", "data=files", "batch.queries=4", "batch.docs=4",
    "trainer.max_epochs=1", "depth=5", "trainer.enable_progress_bar=false", "save_every_steps=1", "name=t5",
    "report=none",
]  # fmt: skip


@pytest.mark.parametrize("lora", [[], ["lora=default", "encoder.lora.merge=true"]], ids=["whole", "lora"])
def test_a_resumed_training_ends_as_a_whole_one_and_is_evaluated(forks, small_files, tmp_path, lora):
    choices = [*CHOICES, *lora, f"data.path={small_files}", f"cache_dir={tmp_path / 'cache'}"]
    for name in ("whole", "killed", "evaluated"):
        (tmp_path / name).mkdir()
    done = forks.run("train.py", *choices, cwd=tmp_path / "whole")
    assert done.code == 0, done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 2, 0.0]
    done = forks.run("train.py", *choices, cwd=tmp_path / "killed", signals=[kill])
    assert done.code == -9, done.out
    done = forks.run(
        "train.py", f"checkpoint={run_folder(tmp_path / 'killed')}", "resume=true", cwd=tmp_path / "killed"
    )
    assert done.code == 0, done.out
    runs = run_folder(tmp_path / "whole"), by_start(tmp_path / "killed/outputs/t5")[-1]
    whole, resumed = (
        torch.load(run / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)["state_dict"] for run in runs
    )
    torch.testing.assert_close(whole, resumed, rtol=0, atol=0)
    assert any("head.decoder.block" in name for name in whole)
    assert any("lora_B" in name and weight.any() for name, weight in whole.items()) == bool(lora)
    if lora:
        pairs = [("the river", "a sea"), ("7 apples", "apples and a river")]
        scores = [Reranker.load(folder, accelerator="cpu").score(pairs) for folder in (runs[0], runs[0] / "merged")]
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
    measures = json.loads((runs[0] / "result.json").read_text())["measures"]
    done = forks.run(
        "evaluate.py", f"checkpoint={runs[0]}", "data=files", f"data.path={small_files}", "depth=5",
        f"cache_dir={tmp_path / 'cache'}", "report=none", cwd=tmp_path / "evaluated",
    )  # fmt: skip
    assert done.code == 0, done.out
    (metrics,) = (tmp_path / "evaluated").rglob("metrics.json")
    assert json.loads(metrics.read_text())["measures"] == pytest.approx(next(iter(measures.values())), abs=1e-6)
