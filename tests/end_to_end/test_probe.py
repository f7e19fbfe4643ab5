"""`probe.py` as a user runs it: seven tasks on two trained rankers, killed once and resumed; its files and numbers."""

import csv
import hashlib
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import sqlite3
import sys
import time
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT
from omegaconf import OmegaConf

from ranker.data.sources.files import Files
from ranker.encoders.loading import load_encoder
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.probing.online_code import permutation
from ranker.probing.options import StudyOptions
from ranker.probing.pairs import sample_pairs
from ranker.probing.results import COLUMNS
from ranker.probing.spacy_model import missing
from ranker.probing.state_cache import StateCache
from ranker.probing.study import Study
from ranker.probing.subject import Subject
from ranker.probing.tasks.bm25 import BM25Score
from ranker.probing.tasks.sem import SemanticSimilarity
from ranker.probing.tasks.tf import TermFrequency
from ranker.probing.training_options import TrainingOptions
from tests.unit.probing.mini import mini_collection

SEVEN = ["bm25", "tf", "sem_svd", "ner", "coref_head", "fact", "rel"]
WHOLE_TEXT = ["bm25", "tf", "sem_svd", "fact", "rel"]
MODELS = ["MonoBERT cross", "DPR bi"]
SHARES = (0.2, 1.0)
LAYERS = (1, 2)
SMALL = [
    "split=test",
    "docs_per_query=4",
    "seeds=[1]",
    "layers=[1,2]",
    f"portions={list(SHARES)}".replace(" ", ""),
    "training.max_rounds=1",
    "training.hidden=8",
    "max_doc_tokens=200",
    "probe.rel.pool=6",
]
BEFORE_THE_KILL = 12  # finished trainings

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "spaCy is there")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a collection (entities, coreference, labelled pairs) and the model folders of two rankers."""
    folder = tmp_path_factory.mktemp("probe")
    data, collection = folder / "mini", mini_collection()
    data.mkdir()
    docs = [{"id": doc.doc_id, "text": doc.text, "title": doc.title} for doc in collection.docs]
    (data / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (data / "queries.tsv").write_text("".join(f"{query_id}\t{text}\n" for query_id, text in collection.queries.items()))
    (data / "qrels.test.txt").write_text(
        "".join(f"{q} 0 {d} {grade}\n" for q, judged in collection.qrels.items() for d, grade in judged.items())
    )
    ranked = [(q, d, rank) for q in collection.queries for rank, d in enumerate(collection.candidates[q], 1)]
    (data / "first.run").write_text("".join(f"{q} Q0 {d} {rank} {-rank} bm25\n" for q, d, rank in ranked))
    labelled = "".join(
        f"{q}\t{d}\t{('SUPPORT', 'CONTRADICT')[(rank + int(q[1:])) % 2]}\n" for q, d, rank in ranked if rank <= 4
    )
    (data / "labels.tsv").write_text(f"query_id\tdoc_id\tlabel\n{labelled}")
    torch.manual_seed(0)
    MonoBERT(load_encoder("tiny")).save(folder / "cross", max_tokens=256)
    DPR(load_encoder("tiny"), query_prompt="ask: ").save(folder / "bi", max_tokens=256, max_query_tokens=64)
    trained_on = OmegaConf.create(
        {
            "data": {"_target_": "ranker.data.sources.files.Files", "path": "elsewhere"},
            "model": {"_target_": "ranker.models.monobert.MonoBERT"},
        }
    )
    OmegaConf.save(trained_on, folder / "cross/ranker.yaml")
    return folder


def arguments(place: Path) -> list[str]:
    return [
        "probe=all",
        "data=files",
        f"data.path={place / 'mini'}",
        f"checkpoint={place / 'cross'}",
        f"compare={place / 'bi'}",
        *SMALL,
    ]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "probe_results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def kept_blocks(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return {
                key: hashlib.md5(arrays).hexdigest()
                for key, arrays in connection.execute("SELECT key, arrays FROM blocks")
            }
        except sqlite3.OperationalError:  # the table is being created
            return {}


def start_probing(place: Path) -> None:
    """Do in a forked process what `python probe.py` does."""
    os.setsid()
    os.chdir(place)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.argv = [str(ROOT / "probe.py"), *arguments(place)]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture(scope="module")
def finished(place: Path, forks) -> Path:
    """Folder of a run of all tasks, after the same command was killed in the middle of its trainings."""
    process = multiprocessing.get_context("fork").Process(target=start_probing, args=(place,))
    process.start()
    blocks = place / ".cache/probe_blocks.sqlite"
    deadline = time.monotonic() + 300
    while len(kept_blocks(blocks)) < BEFORE_THE_KILL and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it was still running"
    assert not list(place.glob("outputs/*/*/probe_results.csv"))
    before = kept_blocks(blocks)
    done = forks.run("probe.py", *arguments(place), "logger=wandb", "name=again", cwd=place)
    assert done.code == 0, done.out
    assert "Traceback" not in done.out
    after = kept_blocks(blocks)
    assert BEFORE_THE_KILL <= len(before) < len(after)
    assert all(after[key] == block for key, block in before.items()), "finished blocks were not trained again"
    (folder,) = place.glob("outputs/again/*")
    return folder


def test_every_task_layer_seed_and_control_has_its_row(finished: Path) -> None:
    found = defaultdict(list)
    for row in rows_of(finished):
        assert tuple(row) == COLUMNS
        found[row["model"], row["task"], row["control"]].append((row["layer"], row["seed"]))
    everywhere = [(str(layer), "1") for layer in LAYERS]
    for model in MODELS:
        for task in SEVEN:
            for control in ("none", "control_task", "random_encoder"):
                assert found.pop((model, task, control)) == everywhere
            assert found.pop((model, task, "shuffled")) == everywhere[1:], "the middle one and the last"
            assert found.pop((model, task, "random_embeddings")) == [("0", "1")]
            assert found.pop((model, task, "label_prior")) == [("", "1")]
            assert found.pop((model, task, "surface"), None) == ([("", "1")] if task in WHOLE_TEXT else None)
    assert not found


def test_the_numbers_follow_from_the_code_lengths(finished: Path) -> None:
    """Code lengths, compression and both units follow from each target's bits; accuracy is a share of test targets."""
    rows = rows_of(finished)
    for task in SEVEN:
        record = json.loads((finished / f"data/{task}.json").read_text())
        counts, tested = sum(record["class_counts"]["train"]), sum(record["class_counts"]["test"])
        own = [row for row in rows if row["task"] == task]
        with np.load(finished / f"codes/{task}.npz") as codes:
            assert len(codes["queries"]) == counts
            for place, row in enumerate(own):
                bits = codes[f"bits{place}"].astype(np.float64)
                first = int(row["t1"]) * math.log2(len(record["classes"]))
                assert (int(row["n_targets"]), int(row["k"])) == (counts, len(record["classes"]))
                assert bits.shape == (counts,)
                assert bits.sum() == pytest.approx(float(row["mdl_bits"]), rel=1e-5)
                assert float(row["uniform_bits"]) == pytest.approx(counts * math.log2(int(row["k"])))
                assert float(row["compression"]) == pytest.approx(float(row["uniform_bits"]) / float(row["mdl_bits"]))
                assert float(row["mdl_legacy"]) == pytest.approx(first + (float(row["mdl_bits"]) - first) * math.log(2))
                assert (float(row["acc"]) * tested) == pytest.approx(round(float(row["acc"]) * tested), abs=1e-6)
                assert row["data_hash"] == record["data_hash"]
    measured = [row for row in rows if row["task"] == "rel" and row["control"] == "none"]
    assert all(0 < float(row[name]) <= 1 for row in measured for name in ("AP", "RR", "nDCG@10", "P@10"))
    assert all(row["AP"] == "" for row in rows if row["task"] != "rel")


def test_labels_bins_and_the_prior_from_the_kept_examples(place: Path, finished: Path) -> None:
    """BM25's bins and the label prior's code length, recomputed by plain loops over the stored examples."""
    (labels,) = (place / ".cache/probe_labels").glob("bm25-*/examples.jsonl")
    examples = [json.loads(line) for line in labels.read_text().splitlines()]
    values = {(e["info"]["qid"], e["info"]["pid"]): e["targets"][0]["value"] for e in examples}
    record = json.loads((finished / "data/bm25.json").read_text())
    with np.load(finished / "codes/bm25.npz") as codes:
        queries = codes["queries"].tolist()
    train = [(query_id, value) for (query_id, _), value in values.items() if query_id in set(queries)]
    assert [query_id for query_id, _ in train] == queries, "all docs of a training query train, and no other query does"
    numbers = [value for _, value in train]
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((value - mean) ** 2 for value in numbers) / len(numbers))
    classes = [min(9, math.floor(10 * min(1.0, max(0.0, 0.25 * (value - mean) / std + 0.5)))) for value in numbers]
    assert [classes.count(i) for i in range(10)] == record["class_counts"]["train"]
    (row,) = (
        r for r in rows_of(finished) if (r["model"], r["task"], r["control"]) == (MODELS[0], "bm25", "label_prior")
    )
    sent = [classes[i] for i in permutation(1, len(classes))]
    ends = [int(len(sent) * share + 1e-9) for share in SHARES]
    length = ends[0] * math.log2(10)
    for start, end in pairwise(ends):
        length -= sum(math.log2((sent[:start].count(label) + 1) / (start + 10)) for label in sent[start:end])
    assert float(row["mdl_bits"]) == pytest.approx(length, abs=1e-6)


def test_pictures_report_and_comparison(finished: Path) -> None:
    report = (finished / "report.md").read_text()
    shown = re.findall(r"\(pictures/(\w+)\.png\)", report)
    kinds = ("heat", "heat_by_row", "selectivity", "online")
    assert sorted(shown) == sorted([f"{kind}_{i}" for kind in kinds for i in range(2)] + ["difference", "lines"])
    for name in shown:
        assert (finished / f"pictures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (finished / f"pictures/{name}.svg").read_text()
    means = defaultdict(list)
    for row in rows_of(finished):
        if row["control"] == "none":
            means[row["model"], row["task"], row["layer"]].append(float(row["compression"]))
    first, second = MODELS
    assert f"## {second} against {first}" in report
    for task in SEVEN:
        for layer in map(str, LAYERS):
            gap = np.mean(means[second, task, layer]) - np.mean(means[first, task, layer])
            assert f"\n| {task} | {layer} | {gap:+.3f} | " in report, (task, layer)
    result = json.loads((finished / "result.json").read_text())
    best = max(map(str, LAYERS), key=lambda layer: np.mean(means[first, "tf", layer]))
    assert result["best"][first]["tf"]["compression"] == pytest.approx(np.mean(means[first, "tf", best]))
    assert any("bi: it is not known what it was trained on" in warning for warning in result["warnings"])
    (told,) = (warning for warning in result["warnings"] if "cross" in warning)
    assert told.startswith("cross: its training data was not compared (data.path: expected a folder"), (
        "its folder names one that is gone"
    )


def test_a_killed_run_ends_with_the_numbers_of_an_uninterrupted_run(
    place: Path, finished: Path, tmp_path: Path
) -> None:
    """All values except seconds equal those of a new study, for the tasks that were running at the kill."""
    splits = Files(str(place / "mini")).load()
    collection = splits.tests["mini"]
    sample = sample_pairs(collection, 2000, 4, 100, 0, 0.1667, 0.1667)
    options = StudyOptions(
        seeds=[1], layers=LAYERS, portions=SHARES, max_doc_tokens=200, val_fraction=0.1667, test_fraction=0.1667
    )
    subjects = [Subject.of_checkpoint(place / "cross", "best")]
    tasks = [BM25Score(), TermFrequency(), SemanticSimilarity()]
    training = TrainingOptions(max_rounds=1, hidden=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = Study(
            subjects, tasks, sample, options, training, StateCache(tmp_path / "states"), tmp_path, torch.device("cpu")
        ).run()
    finally:
        torch.set_num_threads(threads)
    whole = [{name: str(value) for name, value in result.row("bits").items()} for result in results.all]
    again = [
        row for row in rows_of(finished) if row["task"] in {task.name for task in tasks} and row["model"] == MODELS[0]
    ]
    assert len(whole) == len(again)
    for before, after in zip(whole, again, strict=True):
        assert {**before, "seconds": ""} == {**after, "seconds": ""}


def test_wandb_holds_the_pictures_and_the_table(finished: Path) -> None:
    """The files of the offline run contain the pictures and the table of results."""
    (files,) = finished.glob("wandb/offline-run-*/files")
    for picture in (finished / "pictures").glob("*.png"):
        (kept,) = (files / "media/images/probe").glob(f"{picture.stem}_[0-9]*_*.png")
        assert kept.read_bytes() == picture.read_bytes()
    (table,) = (files / "media/table/probe").glob("results_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(COLUMNS)
    assert [dict(zip(COLUMNS, row, strict=True)) for row in content["data"]] == rows_of(finished)


def test_an_earlier_run_on_other_pairs_is_refused_before_anything_is_trained(
    place: Path, finished: Path, forks
) -> None:
    before = kept_blocks(place / ".cache/probe_blocks.sqlite")
    more = [
        "probe=bm25",
        "data=files",
        f"data.path={place / 'mini'}",
        f"checkpoint={place / 'bi'}",
        f"compare={finished}",
    ]
    done = forks.run("probe.py", *more, *SMALL[:-1], "max_pairs=48", "name=refused", cwd=place)
    assert done.code == 1
    assert "error: compare: bm25: expected an earlier run on the same pairs, spans and labels" in done.out
    assert "Traceback" not in done.out
    assert kept_blocks(place / ".cache/probe_blocks.sqlite") == before
    assert not list((place / "outputs/refused").rglob("probe_results.csv"))


def test_a_mistake_is_one_line(place: Path, forks, tmp_path: Path) -> None:
    done = forks.run("probe.py", *arguments(place), "probe=bm52", cwd=tmp_path)
    assert done.code == 1
    (line,) = done.out.splitlines()
    assert line.startswith("error: probe: expected one of all, bm25, coref")
    assert not list(tmp_path.rglob("*"))
