"""Windows from the command line: a needle beyond the first window, stored runs, exact resumes, mistakes in one line."""

import json
import random
from pathlib import Path

import pytest
import torch
from commands import run_all
from safetensors.torch import load_file

from ranker import Reranker
from ranker.checkpoint import load_scorer
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_run
from ranker.models.monobert import MonoBERT
from ranker.passages.windowed import Windowed
from ranker.probing.subject import Subject

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
WINDOWS = ["passages.length=16", "passages.stride=12", "max_doc_tokens=60"]
LETTERS = "abcdefghijklmnopqrstuvwxy"  # without z, the needle


@pytest.fixture(scope="module")
def haystack(tmp_path_factory) -> Path:
    """40 queries, each with a relevant doc of 60 words that has a needle after the first 20, and five without one."""
    folder, rng = tmp_path_factory.mktemp("haystack"), random.Random(3)
    docs, run, qrels = [], [], {"train": [], "dev": [], "test": []}
    for query in range(40):
        split = "train" if query < 24 else "dev" if query < 32 else "test"
        qrels[split].append(f"q{query} 0 d{query}_0 1\n")
        for number in range(6):
            words = rng.choices(LETTERS, k=60)
            if number == 0:
                start = rng.randint(20, 56)
                words[start : start + 3] = "zzz"
            docs.append({"id": f"d{query}_{number}", "title": "h e", "text": " ".join(words)})
        for rank, number in enumerate(rng.sample(range(6), 6)):
            run.append(f"q{query} Q0 d{query}_{number} {rank + 1} {6 - rank} first\n")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "queries.tsv").write_text("".join(f"q{query}\t{rng.choice(LETTERS)}\n" for query in range(40)))
    (folder / "first.run").write_text("".join(run))
    for split, lines in qrels.items():
        (folder / f"qrels.{split}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def done(forks, where, haystack):
    source = ["data=files", f"data.path={haystack}", f"cache_dir={where / 'cache'}", "report=none"]
    train = ["train.py", *source, "encoder=tiny", "logger=none", "batch.queries=4", "batch.docs=6", *CPU, *WINDOWS]
    needle = [*train, "trainer.max_epochs=8", "optim.lr=3e-3"]
    few = [*train, "schedule=constant", "encoder.dropout=0.1", "passages=parade_transformer", "passages.title=2"]
    commands = {
        "firstp": [*needle, "name=firstp", "passages=firstp"],
        "maxp": [*needle, "name=maxp", "passages=maxp", "length_buckets=[10,61]", "report=page"],
        "native": [*needle[:-5], *needle[-2:], "name=native", "max_doc_tokens=62"],
        "evaluate": ["evaluate.py", "checkpoint=@outputs/maxp/*", "name=again", "batch.max_tokens=90", "report=none",
                     *CPU],
        "whole": [*few, "name=whole", "trainer.max_steps=4"],
        "half": [*few, "name=half", "trainer.max_steps=2"],
        "rest": ["train.py", "checkpoint=@outputs/half/*", "resume=true", "name=rest", "trainer.max_steps=4",
                 f"cache_dir={where / 'cache'}"],
        "go on": [*train[:-3], "checkpoint=@outputs/whole/*", "name=on", "trainer.max_steps=1", "max_doc_tokens=60"],
        "dpr": [*train, "name=dpr", "model=dpr", "passages=maxp", "trainer.max_steps=2"],
        "search": ["search.py", "checkpoint=@outputs/dpr/*", "index=flat", *source, *CPU],
        "colbert": [*train, "model=colbert", "passages=maxp", "name=no"],
        "stride": [*train, "passages=maxp", "passages.stride=17", "name=no"],
        "room": [*train, "passages=maxp", "max_pair_tokens=50", "max_query_tokens=32", "name=room"],
        "select": [*train, "model=dpr", "passages=maxp", "passages.select=bm25", "name=no"],
        "buckets": [*train, "passages=maxp", "length_buckets=[512,128]", "name=no"],
    }  # fmt: skip
    commands["go on"].remove("encoder=tiny")
    return run_all(commands, where, forks=forks)


def folder_of(where, name) -> Path:
    return next((where / "outputs" / name).iterdir())


def run_of(where, name, haystack):
    return read_run(folder_of(where, name) / "evaluation" / haystack.name / "run.trec")


def metrics(where, name, haystack):
    return json.loads((folder_of(where, name) / "evaluation" / haystack.name / "metrics.json").read_text())


def test_maxp_and_whole_rows_find_the_needle_that_firstp_does_not_see(done, where, haystack):
    for name in ("firstp", "maxp", "native"):
        assert done[name]["code"] == 0, done[name]["out"]
    found = {name: metrics(where, name, haystack)["measures"]["nDCG@10"] for name in ("firstp", "maxp", "native")}
    assert found["maxp"] == 1
    assert found["native"] > 0.97  # whole docs as rows
    assert found["firstp"] < 0.9


def test_measures_by_length(done, where, haystack):
    content = metrics(where, "maxp", haystack)
    (only,) = content["by_length"]  # all relevant docs have 62 words, with the title
    assert only["words"] == [61, None] and only["num_queries"] == only["num_docs"] == 8
    assert only["measures"] == content["measures"]
    assert only["baseline"] == {name: entry["baseline"] for name, entry in content["comparison"].items()}
    assert "61 or more" in done["maxp"]["out"]
    assert (folder_of(where, "maxp") / f"pictures/{haystack.name}_by_length.png").stat().st_size > 1000
    (only,) = metrics(where, "firstp", haystack)["by_length"]
    assert only["words"] == [0, 128]


def test_a_stored_run_remembers_its_windows(done, where, haystack):
    assert done["evaluate"]["code"] == 0, done["evaluate"]["out"]
    again, first = run_of(where, "again", haystack), run_of(where, "maxp", haystack)
    assert again.keys() == first.keys()
    for query_id, docs in first.items():
        assert again[query_id] == pytest.approx(docs, abs=1e-5)
    assert metrics(where, "again", haystack)["by_length"]
    folder = folder_of(where, "maxp")
    assert Subject.of_checkpoint(folder, "best").name.startswith("MonoBERT")
    (line,) = [line for line in done["maxp"]["out"].splitlines() if "other programs read one row per doc" in line]
    assert "about the first window of a doc (16 tokens)" in line


@pytest.mark.parametrize("name", ["maxp", "whole"])
def test_a_reranker_gives_the_scores_of_the_run(done, where, haystack, name):
    """`whole` repeats the titles, which `rank` takes from the docs."""
    assert done[name]["code"] == 0, done[name]["out"]
    queries, docs = read_queries(haystack / "queries.tsv"), JsonlDocs(haystack / "docs.jsonl")
    reranker = Reranker.load(folder_of(where, name), accelerator="cpu", precision="32-true")
    for query_id, scores in list(run_of(where, name, haystack).items())[:3]:
        ranked = reranker.rank(queries[query_id], [docs[doc_id] for doc_id in scores])
        assert {doc.doc_id: doc.score for doc in ranked} == pytest.approx(scores, abs=1e-5)


def test_weights_of_an_aggregation_are_stored_with_the_model(done, where):
    folder = folder_of(where, "whole")
    best, last = (load_scorer(folder, weights) for weights in ("best", "last"))
    stored = load_file(folder / "model/passages.safetensors")
    assert isinstance(best, Windowed) and isinstance(best.scorer, MonoBERT)
    assert set(stored) == set(best.aggregation.state_dict()) == set(last.aggregation.state_dict())
    assert all(torch.equal(value, best.aggregation.state_dict()[name]) for name, value in stored.items())
    assert any("without the trained layers" in line for line in done["whole"]["out"].splitlines())
    assert (best.windows.length, best.windows.stride, best.windows.title) == (16, 12, 2)


def test_a_resumed_training_ends_with_the_same_bits(done, where):
    for name in ("half", "rest"):
        assert done[name]["code"] == 0, done[name]["out"]
    whole, rest = (
        torch.load(folder_of(where, name) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "rest")
    )
    assert whole.keys() == rest.keys() and any("aggregation" in name for name in whole)
    assert all(torch.equal(value, rest[name]) for name, value in whole.items())


def test_a_training_from_a_stored_model_keeps_its_windows(done, where):
    assert done["go on"]["code"] == 0, done["go on"]["out"]
    scorer = load_scorer(folder_of(where, "on"))
    assert isinstance(scorer, Windowed) and scorer.windows.title == 2


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "search": ["checkpoint: expected a model with one vector per doc", "re-rank with evaluate.py"],
        "colbert": ["passages: expected none with ColBERT", "got MaxP"],
        "stride": ["passages.stride: expected at most passages.length=16, got 17"],
        "room": ["passages.length: expected at most 15, since a row of 50 tokens", "a query of up to 32", "got 16"],
        "select": ["passages.select: expected first"],
        "buckets": ["length_buckets: expected rising bounds, got [512, 128]"],
    }.items(),
)
def test_mistakes_are_one_line(done, name, parts):
    assert done["dpr"]["code"] == 0, done["dpr"]["out"]
    assert done[name]["code"] == 1
    error = done[name]["err"].strip().splitlines()[-1]
    assert all(part in error for part in parts), done[name]["err"]
    assert "Traceback" not in done[name]["out"]
    assert name == "search" or not done[name]["left"]
