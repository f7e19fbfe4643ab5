"""`ranker label`: teachers of all kinds, killed and resumed, on two processes, read by a training; refused commands."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_all
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

from ranker.data.trec import read_qrels, read_run, write_run
from ranker.encoders.tiny import tiny_config, tiny_lm_config, tiny_lm_tokenizer, tiny_tokenizer

SMALL = ["trainer.enable_progress_bar=false", "trainer.accelerator=cpu"]

ROWS = [
    {"query": f"bab dom {i}", "document": f"fel gir {j}", "label": int(i == j)}
    for i in range(9)
    for j in range(i, i + 3)
]


def cross_encoder(folder: Path, num_labels: int, seed: int) -> Path:
    """A folder as transformers writes it: a BERT classifier of random weights large enough that scores differ."""
    torch.manual_seed(seed)
    config = BertConfig(**{**tiny_config().to_dict(), "num_labels": num_labels, "initializer_range": 0.3})
    BertForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def where(tmp_path_factory, small_files):
    folder = tmp_path_factory.mktemp("label")
    shutil.copytree(small_files, folder / "data")
    cross_encoder(folder / "one", 1, 0)
    cross_encoder(folder / "two", 2, 1)
    return folder


def label(*arguments: str) -> list[str]:
    return ["ranker/__main__.py", "label", "data=files", "data.path=data", "depth=6", *SMALL, *arguments]


@pytest.fixture(scope="module")
def done(forks, where):
    train = [
        "train.py",
        "data=files",
        "data.path=data",
        "depth=6",
        "encoder=tiny",
        "logger=none",
        "report=none",
        *SMALL,
    ]
    train += ["trainer.max_steps=2", "batch.queries=4", "batch.docs=3"]
    commands = {
        "one": label("teacher=one", "name=one", "shard_queries=7"),
        "found": label("teacher=one", "name=found", "shard_queries=7"),
        "both": label("teacher=[one,two]", "name=both", "scale=minmax"),
        "own": [*train, "name=own"],
        "runs": label("teacher=@outputs/own/*", "name=runs"),
        "mixed": label("teacher=[two,given.trec]", "name=mixed"),
        "keep": label("teacher=two", "name=keep", "keep=3"),
        "given": label("teacher=one", "name=given", "candidates=cand.trec", "add_positives=false"),
        "rows": [
            "ranker/__main__.py",
            "label",
            "data=rows",
            "data.train=rows.jsonl",
            "teacher=one",
            "name=rows",
            *SMALL,
        ],
        "reader": label("teacher=reader", "reader.name=reader", "reader.answers=answers.tsv", "name=reader"),
        "taught": [*train, "name=taught", "loss=marginal_likelihood", "data.teacher=@outputs/reader/*/labels.trec"],
        "no answers": label("teacher=reader", "reader.name=reader"),
        "too few answers": label("teacher=reader", "reader.name=reader", "reader.answers=few.tsv"),
        "no reader": label("teacher=reader", "reader.name=one", "reader.answers=answers.tsv"),
        "student": [*train, "name=student", "loss=margin_mse", "data.teacher=@outputs/one/*/labels.trec"],
        "mse": [*train, "name=mse", "loss=mse", "batch.positives=1", "data.teacher=@outputs/both/*/labels.trec"],
        "none": ["ranker/__main__.py", "label", "data=files", "data.path=data"],
        "no data": ["ranker/__main__.py", "label", "teacher=one"],
        "missing": label("teacher=[one,nowhere]"),
        "twice": label("teacher=[one,./one]"),
        "scale": label("teacher=one", "scale=rank"),
        "other ids": label("teacher=other.trec"),
        "empty": label("teacher=[]"),
    }
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_lm_config()).save_pretrained(where / "reader")
    tiny_lm_tokenizer().save_pretrained(where / "reader")
    queries = [line.split("\t")[0] for line in (where / "data/queries.tsv").read_text().splitlines()]
    (where / "answers.tsv").write_text("".join(f"{query_id}\tfel {query_id}\n" for query_id in queries))
    (where / "few.tsv").write_text("q1\tfel\n")
    write_run(where / "cand.trec", {"q1": {"d1": 2.0, "d5": 1.0}, "q2": {"d9": 1.0}})
    write_run(where / "other.trec", {"x1": {"d1": 2.0}})
    write_run(where / "given.trec", {f"q{i}": {f"d{j}": float(j) for j in range(0, 60, 2)} for i in range(24)})
    return run_all(commands, where, forks=forks)


def folder_of(where, name):
    return next((where / "outputs" / name).iterdir())


def test_all_commands_end_as_they_should(done):
    mistakes = {
        "none": "error: teacher: expected a value, got none; set teacher=...",
        "no data": "error: data: expected data=..., since the teacher does not say what it was trained on, got null",
        "missing": "which does not exist",
        "twice": "error: teacher: expected each teacher once",
        "scale": "error: scale: expected one of auto, none, zscore, minmax; got 'rank'",
        "other ids": "error: teacher: expected scores for the docs of train, got none; check the ids of the run",
        "no answers": "error: reader.answers: expected a file of query ids and answers with teacher=reader, got null",
        "too few answers": "few.tsv: expected an answer for each of",
        "no reader": "error: reader.name: expected a language model or a sequence-to-sequence model, got",
        "empty": "error: teacher: expected a run folder, a model folder, a TREC run, or a list of these; got []",
    }
    for name, result in done.items():
        if name in mistakes:
            assert result["code"] == 1 and mistakes[name] in result["err"], (name, result["out"])
            assert "Traceback" not in result["out"] and not result["left"], (name, result["left"])
        else:
            assert result["code"] == 0, (name, result["out"][-2000:])


def test_the_labels_cover_candidates_and_positives(done, where):
    labels = read_run(folder_of(where, "one") / "labels.trec")
    qrels = read_qrels(where / "data/qrels.train.txt")
    stage = read_run(folder_of(where, "one") / "first_stage.trec")
    assert set(labels) <= set(qrels)
    for query_id, docs in labels.items():
        assert set(qrels[query_id]) <= set(docs) and set(docs) == set(stage[query_id]) and len(docs) <= 7


def test_the_scores_are_those_of_sentence_transformers(done, where):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = {row["id"]: row["text"] for row in map(json.loads, (where / "data/docs.jsonl").read_text().splitlines())}
    queries = dict(line.split("\t") for line in (where / "data/queries.tsv").read_text().splitlines())
    for name, teacher in (("one", "one"), ("keep", "two")):
        labels = read_run(folder_of(where, name) / "labels.trec")
        pairs = [(query_id, doc_id) for query_id, docs in labels.items() for doc_id in docs]
        model = sentence_transformers.CrossEncoder(
            str(where / teacher), device="cpu", activation_fn=torch.nn.Identity()
        )
        logits = model.predict([(queries[q], texts[d]) for q, d in pairs])
        expected = logits if logits.ndim == 1 else logits[:, 1] - logits[:, 0]
        got = np.array([labels[q][d] for q, d in pairs])
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_finished_shards_are_found_again(done, where):
    assert "4 of 4 shards are scored already" in done["found"]["out"]
    first, again = (folder_of(where, name) / "labels.trec" for name in ("one", "found"))
    assert first.read_text().replace(" one\n", " x\n") == again.read_text().replace(" found\n", " x\n")


def test_the_mean_of_two_teachers_by_hand(done, where):
    folder = folder_of(where, "both")
    labels, *teachers = (read_run(folder / f"{name}.trec") for name in ("labels", "teacher_1", "teacher_2"))
    for query_id, docs in labels.items():
        for doc_id, label in docs.items():
            scaled = []
            for teacher in teachers:
                values = teacher[query_id]
                low, high = min(values.values()), max(values.values())
                scaled.append((values[doc_id] - low) / (high - low))
            assert label == pytest.approx(sum(scaled) / 2, abs=1e-9)
    report = json.loads((folder / "label.json").read_text())
    assert report["scale"] == "minmax" and report["teachers"] == [f"{where.name}/one", f"{where.name}/two"]
    assert f"{where.name}/one ~ {where.name}/two" in report["kendall"]


def test_a_reader_s_labels_are_those_of_transformers(done, where):
    """The labels of one query, each by the whole text alone; `tests/unit/labelling/test_reader.py` has the rest."""
    texts = {row["id"]: row["text"] for row in map(json.loads, (where / "data/docs.jsonl").read_text().splitlines())}
    queries = dict(line.split("\t") for line in (where / "data/queries.tsv").read_text().splitlines())
    labels = read_run(folder_of(where, "reader") / "labels.trec")
    model, tokenizer = LlamaForCausalLM.from_pretrained(where / "reader").eval(), tiny_lm_tokenizer()
    query_id = next(iter(labels))
    for doc_id, label in labels[query_id].items():
        prompt = f"{texts[doc_id]}\n\nQuestion: {queries[query_id]}\nAnswer:"
        start, whole = len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt} fel {query_id}")["input_ids"]
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(1)
        assert label == pytest.approx(sum(log_p[i - 1, whole[i]].item() for i in range(start, len(whole))), abs=1e-4)


def test_a_given_run_teaches_where_it_has_scores(done, where):
    report = json.loads((folder_of(where, "mixed") / "label.json").read_text())
    assert "docs are left out, since a teacher's run lacks them" in done["mixed"]["out"]
    given, labels = read_run(where / "given.trec"), read_run(folder_of(where, "mixed") / "labels.trec")
    assert report["scale"] == "zscore"
    assert all(doc_id in given[query_id] for query_id, docs in labels.items() for doc_id in docs)


def test_keep_keeps_positives_and_three_docs(done, where):
    labels = read_run(folder_of(where, "keep") / "labels.trec")
    everything = read_run(folder_of(where, "keep") / "teacher_1.trec")
    for query_id, docs in labels.items():
        assert len(docs) == min(3, len(everything[query_id])) and query_id.replace("q", "d") in docs


def test_given_candidates_are_scored_and_no_others(done, where):
    labels = read_run(folder_of(where, "given") / "labels.trec")
    assert {query_id: set(docs) for query_id, docs in labels.items()} == {"q1": {"d1", "d5"}, "q2": {"d9"}}


def test_the_docs_of_rows_are_scored(done, where):
    report = json.loads((folder_of(where, "rows") / "label.json").read_text())
    labels = read_run(folder_of(where, "rows") / "labels.trec")
    assert {len(docs) for docs in labels.values()} == {3} and report["queries"] == len(labels) == 9


def command(cache: str, name: str) -> list[str]:
    return label("teacher=[one,two]", f"name={name}", "shard_queries=5", f"cache_dir={cache}")


def test_a_killed_labelling_goes_on_with_the_missing_shards_and_the_same_bits(forks, where):
    whole = forks.run(*command("whole", "whole"), cwd=where)
    killed = forks.run(
        *command("killed", "resumed"), cwd=where, signals=[[0, 0, "SIGKILL", "os.rename", "shard-00002", 1, 0]]
    )
    assert (whole.code, killed.code) == (0, -9), killed.out
    before = {path: path.stat().st_mtime_ns for path in where.glob("killed/labels/*/shard-*.npz")}
    assert sorted(path.name for path in before) == ["shard-00000.npz", "shard-00001.npz"]
    shutil.rmtree(where / "outputs/resumed")
    resumed = forks.run(*command("killed", "resumed"), cwd=where)
    assert resumed.code == 0 and "2 of 5 shards are scored already" in resumed.out, resumed.out
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert labels_of(where, "resumed") == labels_of(where, "whole")


def test_two_processes_give_the_same_bits(forks, where):
    done = forks.run(*command("pair", "pair"), "trainer.devices=2", cwd=where, devices=2)
    assert done.codes == [0, 0], done.out
    alone = forks.run(*command("alone", "alone"), cwd=where)
    assert alone.code == 0, alone.out
    assert labels_of(where, "pair") == labels_of(where, "alone")
    assert done.out.count("labels of 24 queries") == 1


def labels_of(where: Path, name: str) -> str:
    return (folder_of(where, name) / "labels.trec").read_text().replace(f" {name}\n", "\n")
