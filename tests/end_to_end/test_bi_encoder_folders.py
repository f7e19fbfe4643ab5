"""Bi-encoders that start from another program's folder, or with new marker tokens, train and resume correctly."""

import json

import pytest
import torch
from commands import run_folder
from torch import nn

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.models.dpr import DPR

SMALL = [
    "data=files",
    "batch.queries=4",
    "batch.docs=2",
    "depth=5",
    "trainer.max_steps=6",
    "trainer.enable_progress_bar=false",
    "report=none",
    "save_every_steps=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bi-encoder in sentence-transformers' layout with modules that no key of model=dpr describes."""
    torch.manual_seed(3)
    scorer = DPR(load_encoder("tiny", dropout=0.0), pooling="last", query_prompt="query: ")
    scorer.projection = nn.Sequential(nn.Linear(32, 48), nn.Mish(), nn.Linear(48, 8, bias=False), nn.Identity())
    path = tmp_path_factory.mktemp("theirs") / "bi"
    scorer.save(path, max_tokens=64)
    return path


@pytest.fixture(params=["dpr", "colbert"])
def start(request, folder):
    """The first choices of a training."""
    if request.param == "dpr":
        return ["model=dpr", f"checkpoint={folder}"]
    return ["model=colbert", "encoder=tiny", "model.projection=8", "model.query_length=12"]


def test_a_killed_training_goes_on_exactly(forks, small_files, tmp_path, start):
    choices = [*start, *SMALL, f"data.path={small_files}", f"cache_dir={tmp_path / 'cache'}"]
    for name in ("whole", "killed", "resumed"):
        (tmp_path / name).mkdir()
    whole = forks.run("train.py", *choices, cwd=tmp_path / "whole")
    assert whole.code == 0, whole.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 4, 0.0]
    assert forks.run("train.py", *choices, cwd=tmp_path / "killed", signals=[kill]).code == -9
    killed = run_folder(tmp_path / "killed")
    half_trained = load_scorer(killed, "last").state_dict()
    done = forks.run("train.py", f"checkpoint={killed}", "resume=true", cwd=tmp_path / "resumed")
    assert done.code == 0, done.out
    one, other = (load_scorer(run_folder(tmp_path / name), "last").state_dict() for name in ("whole", "resumed"))
    assert one.keys() == other.keys() == half_trained.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not all(torch.equal(one[key], half_trained[key]) for key in one)
    model = load_scorer(run_folder(tmp_path / "resumed"))
    if start[0] == "model=dpr":
        assert (model.pooling, model.query_prompt, str(model.projection[1])) == ("last", "query: ", "Mish()")
    else:
        assert "markers [unused0], [unused1]: added to the vocabulary" in whole.out
        assert model.encoder.config.vocab_size == len(model.encoder.tokenizer)


def test_the_encoder_of_a_bi_encoder_leaves_the_rest_behind_and_says_so(forks, small_files, tmp_path, folder):
    choices = [
        "model=dpr",
        "encoder=bert_base",
        f"encoder.name={folder}",
        *SMALL,
        f"data.path={small_files}",
        "trainer.max_steps=1",
    ]
    done = forks.run("train.py", *choices, cwd=tmp_path)
    assert done.code == 0, done.out
    (line,) = [line for line in done.out.splitlines() if "left out: " in line]
    assert line.endswith(
        f"encoder.name: only the encoder of {folder} is used; left out: pooling (last), Dense (32 to 48, 48 to 8), "
        f"prompts (query 'query: '); checkpoint={folder} continues with the whole model"
    )


@pytest.mark.parametrize("key", ["checkpoint", "encoder.name"])
def test_an_adapter_is_named(forks, small_files, tmp_path, key):
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-Embedding-0.6B"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    choices = ["model=dpr", "encoder=bert_base", f"{key}={tmp_path / 'adapter'}", *SMALL, f"data.path={small_files}"]
    done = forks.run("train.py", *choices, cwd=tmp_path)
    assert done.code == 1
    for part in (
        "expected a LoRA adapter with adapter_model.safetensors and base_model_name_or_path, got 'LORA' of the model "
        "'Qwen/Qwen3-Embedding-0.6B'",
        "merge other kinds with peft's merge_and_unload, and name the result",
    ):
        assert part in done.out.replace("\n", " ")
