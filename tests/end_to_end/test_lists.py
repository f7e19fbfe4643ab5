"""Models of lists from the command line: exact resumes, orders, windows, stored models, refused exports, mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_all

from ranker import Reranker
from ranker.checkpoint import load_scorer
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_run
from ranker.evaluation.metrics import evaluate
from ranker.lists.duo import Duo
from ranker.probing.subject import Subject

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
QUICK = ["report=none", *CPU]
MODELS = {"set_encoder": "tiny", "listwise_lm": "tiny_lm", "duo": "tiny_t5"}


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("lists")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    source = ["data=files", f"data.path={small_files}", f"cache_dir={where / 'cache'}", *QUICK]
    few = ["logger=none", "batch.queries=4", "batch.docs=4", "depth=7", "val_depth=4", "schedule=constant"]
    commands = {}
    for model, encoder in MODELS.items():
        train = ["train.py", *source, *few, f"model={model}", f"encoder={encoder}"]
        train += [] if encoder == "tiny_lm" else ["encoder.dropout=0.1"]
        commands[model] = [*train, "trainer.max_steps=4", f"name={model}"]
    set_encoder = [*commands["set_encoder"][:-2], "model.window=5", "batch.novelty=0.8"]
    commands |= {
        "half": [*commands["listwise_lm"][:-2], "trainer.max_steps=2", "name=half"],
        "rest": ["train.py", "checkpoint=@outputs/half/*", "resume=true", "trainer.max_steps=4", "name=rest",
                 f"cache_dir={where / 'cache'}"],
        "window": [*set_encoder, "trainer.max_steps=4", "name=window"],
        "set half": [*set_encoder, "trainer.max_steps=2", "name=set_half"],
        "set rest": ["train.py", "checkpoint=@outputs/set_half/*", "resume=true", "trainer.max_steps=4",
                     "name=set_rest", f"cache_dir={where / 'cache'}"],
        "duo half": [*commands["duo"][:-2], "trainer.max_steps=2", "name=duo_half"],
        "duo rest": ["train.py", "checkpoint=@outputs/duo_half/*", "resume=true", "trainer.max_steps=4",
                     "name=duo_rest", f"cache_dir={where / 'cache'}"],
        "orders": ["evaluate.py", "checkpoint=@outputs/listwise_lm/*", "name=orders", "orders=3", *QUICK,
                   "batch.max_tokens=300"],
        "no order": ["evaluate.py", "checkpoint=@outputs/set_encoder/*", "name=no_order", "orders=2", *QUICK],
        "sliding": ["evaluate.py", "checkpoint=@outputs/listwise_lm/*", "name=sliding", "lists.window=4",
                    "lists.merge=sliding", *QUICK],
        "whole": ["evaluate.py", "checkpoint=@outputs/window/*", "name=whole", "lists.window=null", *QUICK],
        "export": ["ranker/__main__.py", "export", "checkpoint=@outputs/set_encoder/*", "format=hf", "to=exported"],
        "monobert": ["train.py", *source, *few, "encoder=tiny", "trainer.max_steps=1", "name=monobert"],
        "alone": ["evaluate.py", "checkpoint=@outputs/monobert/*", "orders=2", "name=no", *CPU],
        "windows": ["evaluate.py", "checkpoint=@outputs/duo/*", "lists.window=4", "name=no", *CPU],
        "passages": ["train.py", *source, *few, "model=set_encoder", "encoder=tiny", "passages=maxp", "name=no"],
        "top": ["train.py", *source, *few, "model=duo", "model.top=3", "encoder=tiny", "name=no"],
        "novelty": ["train.py", *source, *few, "model=set_encoder", "encoder=tiny", "batch.novelty=1.5", "name=no"],
        "causal": ["train.py", *source, *few, "model=set_encoder", "encoder=tiny_lm", "name=no"],
    }  # fmt: skip
    return run_all(commands, where, forks=forks)


def folder_of(where, name) -> Path:
    return next((where / "outputs" / name).iterdir())


def set_of(where, name, small_files) -> Path:
    return folder_of(where, name) / "evaluation" / small_files.name


@pytest.mark.parametrize("name", [*MODELS, "window"])
def test_a_reranker_gives_the_scores_of_the_run(done, where, small_files, name):
    assert done[name]["code"] == 0, done[name]["out"]
    assert "the formats of other programs hold no lists" in done[name]["out"]
    queries, docs = read_queries(small_files / "queries.tsv"), JsonlDocs(small_files / "docs.jsonl")
    reranker = Reranker.load(folder_of(where, name), accelerator="cpu", precision="32-true")
    run = read_run(set_of(where, name, small_files) / "run.trec")
    if name != "set_encoder":  # the order of the candidates is that of the first stage, which the run does not keep
        return
    for query_id, scores in list(run.items())[:3]:
        ranked = reranker.rank(queries[query_id], [docs[doc_id] for doc_id in scores])
        assert {doc.doc_id: doc.score for doc in ranked} == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(("whole", "rest"), [("listwise_lm", "rest"), ("window", "set_rest"), ("duo", "duo_rest")])
def test_a_resumed_training_ends_with_the_same_bits(done, where, whole, rest):
    for name in ("half", "rest", "set half", "set rest", "duo half", "duo rest"):
        assert done[name]["code"] == 0, done[name]["out"]
    one, other = (
        torch.load(folder_of(where, name) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in (whole, rest)
    )
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_sensitivity_to_the_order_is_computed_from_runs(done, where, small_files):
    assert done["orders"]["code"] == 0, done["orders"]["out"]
    folder = set_of(where, "orders", small_files)
    runs = [read_run(folder / name) for name in ("run.trec", "order-2.trec", "order-3.trec")]
    content = json.loads((folder / "orders.json").read_text())
    taus = []
    for query_id, docs in runs[0].items():
        signs = []
        for run in runs:
            scores = np.array([run[query_id][doc_id] for doc_id in docs])
            signs.append(np.sign(scores[:, None] - scores)[np.triu_indices(len(docs), 1)])
        taus.append(np.mean([(signs[0] * signs[1]).mean(), (signs[0] * signs[2]).mean(), (signs[1] * signs[2]).mean()]))
    assert content["orders"] == 3 and content["kendall_tau"]["queries"] == 8
    assert content["kendall_tau"]["mean"] == pytest.approx(np.mean(taus), abs=1e-6)
    assert content["kendall_tau"]["mean"] < 1
    qrels = {query_id: {f"d{query_id[1:]}": 1} for query_id in runs[0]}
    expected = [evaluate(run, qrels, ["nDCG@10"], 1).means["nDCG@10"] for run in runs]
    assert content["measures"]["nDCG@10"]["values"] == pytest.approx(expected, abs=1e-9)
    assert done["no order"]["code"] == 0, done["no order"]["out"]
    assert (
        json.loads((set_of(where, "no_order", small_files) / "orders.json").read_text())["kendall_tau"]["lowest"] == 1
    )


def test_windows_are_chosen_by_a_key(done, where, small_files):
    for name in ("sliding", "whole"):
        assert done[name]["code"] == 0, done[name]["out"]
    for scores in read_run(set_of(where, "sliding", small_files) / "run.trec").values():
        assert sorted(scores.values()) == [1, 2, 3, 4, 5, 6, 7]  # final places
    windows, whole = (read_run(set_of(where, name, small_files) / "run.trec") for name in ("window", "whole"))
    assert load_scorer(folder_of(where, "window")).lists.size == 5
    assert windows.keys() == whole.keys() and windows != whole


def test_stored_models(done, where):
    duo = load_scorer(folder_of(where, "duo"))
    assert isinstance(duo, Duo) and duo.is_t5
    for name in MODELS:
        assert Subject.of_checkpoint(folder_of(where, name), "best").encoder is not None


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "export": [
            "format: expected the run's model/, since no format holds the lists of docs",
            "SetEncoder",
            "got hf",
        ],
        "alone": ["orders: expected a model of lists", "got MonoBERT"],
        "windows": ["lists: expected set_encoder or listwise_lm", "got Duo"],
        "passages": ["passages: expected none with SetEncoder"],
        "top": ["model.top: expected at least batch.docs=4", "got 3"],
        "novelty": ["batch.novelty: expected a share above 0 and at most 1"],
        "causal": ["encoder: expected a model whose tokens attend in both directions"],
    }.items(),
)
def test_mistakes_are_one_line(done, name, parts):
    assert done[name]["code"] == 1, done[name]["out"]
    error = done[name]["err"].strip().splitlines()[-1]
    assert all(part in error for part in parts), done[name]["err"]
    assert "Traceback" not in done[name]["out"]
