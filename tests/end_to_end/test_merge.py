"""`ranker merge`: the written model has the mean of the weights; mistakes in one line."""

import json

import pytest
import torch
from commands import run_all
from omegaconf import OmegaConf
from transformers import AutoModelForSequenceClassification

from ranker import Reranker
from ranker.checkpoint import save_model
from ranker.encoders.loading import load_encoder
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

MERGE = ["ranker/__main__.py", "merge"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """Three model folders: two cross-encoders that fit together, and a bi-encoder."""
    where = tmp_path_factory.mktemp("merge")
    limits = {"data": {}, "max_query_tokens": 8, "max_doc_tokens": 24, "max_pair_tokens": None, "depth": 5}
    for seed, (name, model) in enumerate({"a": MonoBERT, "b": MonoBERT, "dpr": DPR}.items()):
        torch.manual_seed(seed)
        scorer = model(load_encoder("tiny"))
        if model is MonoBERT:
            torch.nn.init.normal_(scorer.head.weight)
        target = f"{model.__module__}.{model.__name__}"
        encoder = {"_target_": "ranker.encoders.loading.load_encoder", "name": "tiny"}
        save_model(
            where / name, scorer, OmegaConf.create({"model": {"_target_": target}, "encoder": encoder, **limits})
        )
    return where


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    data = ["data=files", f"data.path={small_files}"]
    commands = {
        "mean": [*MERGE, "name=mean", "runs=[a,b]", "shares=[3,1]"],
        "tuned": [*MERGE, "name=tuned", "runs=[a,b]", "tune.measure=nDCG@10", "tune.step=0.5", *data, "depth=4"],
        "one": [*MERGE, "runs=[a]"],
        "shares": [*MERGE, "runs=[a,b]", "shares=[0,0]"],
        "method": [*MERGE, "runs=[a,b,a]", "interpolation=slerp"],
        "misfit": [*MERGE, "runs=[a,dpr]"],
    }
    return run_all(commands, where, forks=forks)


def test_the_written_weights_are_the_mean_and_the_limits_stay(done, where):
    assert done["mean"]["code"] == 0, done["mean"]["out"]
    (merged,) = where.glob("outputs/mean/*/model")
    models = [
        AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
        for folder in (where / "a", where / "b", merged)
    ]
    for name, weights in models[2].items():
        torch.testing.assert_close(weights, 0.75 * models[0][name] + 0.25 * models[1][name])
    assert "max_doc_tokens: 24" in (merged / "ranker.yaml").read_text()
    assert Reranker.load(merged, accelerator="cpu").score([("the river", "the sea")]).shape == (1,)


def test_the_shares_with_the_best_measure_are_found_and_written(done, where):
    assert done["tuned"]["code"] == 0, done["tuned"]["out"]
    (path,) = where.glob("outputs/tuned/*/merge.json")
    content = json.loads(path.read_text())
    assert len(content["trials"]) == 9 and content["value"] == max(trial["value"] for trial in content["trials"])
    share = content["shares"]["layer 2"][1]
    name = "encoder.layer.1.output.dense.weight"
    one, other, merged = (
        AutoModelForSequenceClassification.from_pretrained(folder).base_model.state_dict()[name]
        for folder in (where / "a", where / "b", path.parent / "model")
    )
    torch.testing.assert_close(merged, (1 - share) * one + share * other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "runs: expected a list of at least two folders, runs=[A,B]; got ["),
        ("shares", "shares: expected a number of at least 0 for each run, not all 0, or null; got [0, 0]"),
        ("method", "interpolation: slerp takes two runs, got 3 runs; set linear, which takes any number"),
        ("misfit", "runs: expected models of one class, got MonoBERT in "),
    ],
)
def test_mistakes_are_one_line(done, name, message):
    assert done[name]["code"] == 1
    (error,) = [line for line in done[name]["out"].splitlines() if line.startswith("error: ")]
    assert message in error, json.dumps(error)
    assert "Traceback" not in done[name]["out"]
