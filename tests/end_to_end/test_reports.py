"""`report.html` of each command that measures, `ranker compare` and `ranker fuse`, on one small collection."""

import json
import re

import ir_measures
import pytest
from commands import run_all

from ranker.data.corpus_files import read_queries
from ranker.data.trec import read_qrels, read_run, write_run

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
RANKER = "ranker/__main__.py"
MEASURES = ["nDCG@10", "RR@10", "AP@100", "R@100"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    for name, step in (("one.trec", 1), ("two.trec.gz", 7)):
        write_run(where / name, {f"q{i}": {f"d{(i + step * j) % 60}": 9.0 - j for j in range(6)} for i in range(40)})
    data = ["data=files", f"data.path={small_files}"]
    test, dev = small_files / "qrels.test.txt", small_files / "qrels.dev.txt"
    a, b = f"own/evaluation/{small_files.name}/run.trec", f"bm25/evaluation/{small_files.name}/run.trec"
    small = ["encoder=tiny", "depth=8", "trainer.max_steps=4", "batch.queries=4", "batch.docs=3", *CPU]
    fuse = [RANKER, "fuse", f"runs=[{a},{b}]"]
    commands = {
        "train": ["train.py", *data, *small, "hydra.run.dir=own", "trainer.val_check_interval=2",
                  "report.text_length=9", "trainer.check_val_every_n_epoch=null", "trainer.log_every_n_steps=1"],
        "search": ["search.py", "model=bm25", *data, "depth=10", "hydra.run.dir=bm25"],
        "dev": ["search.py", "model=bm25", *data, "depth=10", "split=val", "hydra.run.dir=dev", "report=none"],
        "checkpoint": ["evaluate.py", "checkpoint=own", "hydra.run.dir=again", "depth=8", *CPU],
        "files": ["evaluate.py", f"run={a}", f"qrels={test}", f"baseline={b}", "hydra.run.dir=files"],
        "quiet": ["evaluate.py", f"run={a}", f"qrels={test}", f"baseline={b}", "hydra.run.dir=quiet", "report=none"],
        "fuse": [*fuse, "hydra.run.dir=fused"],
        "tuned": [*fuse, f"tune.runs=[dev,{'dev/evaluation/val/run.trec'}]", f"tune.qrels={dev}", "method=weighted",
                  "tune.step=0.5", "hydra.run.dir=tuned"],
        "compare": [RANKER, "compare", "runs=[own,bm25,fused]", "hydra.run.dir=compared", "report.depth=3"],
        "all": [RANKER, "fuse", "runs=[one.trec,two.trec.gz]", "hydra.run.dir=all"],
        "evaluations": [RANKER, "compare", "runs=[again,own]", "hydra.run.dir=evaluations", "labels=[A,B]"],
        "first stage": ["train.py", *data, *small, f"data.candidates={where / 'all/run.trec'}", "hydra.run.dir=second",
                        "report=none"],
        "candidates": ["evaluate.py", "checkpoint=own", *data, f"candidates={'fused/run.trec'}", "hydra.run.dir=third",
                       "depth=5", *CPU],
        "a word": ["evaluate.py", f"run={a}", f"qrels={test}", "hydra.run.dir=word", "report.depth=nine"],
        "no judgements": [RANKER, "compare", f"runs=[{a},{b}]"],
        "one run": [RANKER, "fuse", f"runs=[{a}]"],
        "no run": [RANKER, "fuse", f"runs=[{a},own/model]"],
        "other weights": [*fuse, "weights=[1,2,3]"],
        "other queries": [*fuse, f"tune.qrels={dev}"],
    }  # fmt: skip
    return run_all(commands, where, forks=forks)


def page(where, name):
    """The text of a page and its data."""
    text = (where / name / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.S)
    return text, json.loads(found.group(1))


def values_of(run, qrels):
    """(query, measure) -> value, by ir_measures alone."""
    measures = [ir_measures.parse_measure(name) for name in MEASURES]
    return {(entry.query_id, str(entry.measure)): entry.value for entry in ir_measures.iter_calc(measures, qrels, run)}


SUCCEED = ("train", "search", "dev", "checkpoint", "files", "fuse", "tuned", "compare", "evaluations", "all",
           "first stage", "candidates")  # fmt: skip


@pytest.mark.parametrize("name", SUCCEED)
def test_a_command_succeeds(done, name):
    assert done[name]["code"] == 0, done[name]["out"][-3000:]


@pytest.mark.parametrize(("name", "labels", "texts"), [
    ("own", ["first stage", "run"], True), ("again", ["first stage", "run"], True), ("bm25", ["run"], True),
    ("files", ["baseline", "run"], False), ("compared", ["own", "bm25", "fused"], True)])  # fmt: skip
def test_each_page_has_the_values_of_its_runs(done, where, small_files, name, labels, texts):
    text, (part,) = page(where, name)
    qrels = read_qrels(small_files / "qrels.test.txt")
    folders = {"compared": ["own", "bm25", "fused"], "files": ["bm25", "own"]}.get(name, [name])
    of_set = f"evaluation/{small_files.name}"
    runs = [read_run(where / path / ("" if path == "fused" else of_set) / "run.trec") for path in folders]
    assert len(part["rows"]) == part["queries"] == 8 and part["measures"] == MEASURES
    for number, run in enumerate(runs, len(part["runs"]) - len(runs)):
        expected = values_of(run, qrels)
        for query_id, _, values in part["rows"]:
            assert values[number] == pytest.approx([expected.get((query_id, m), 0.0) for m in MEASURES], abs=1e-6)
    queries = read_queries(small_files / "queries.tsv")
    assert all(row[1] == (queries[row[0]][:8] + "…" if name == "own" else queries[row[0]] if texts else "")
               for row in part["rows"])  # fmt: skip
    assert all(len(doc) == (3 if texts else 1) for doc in part["docs"])
    assert part["runs"] == labels
    assert ("Training loss" in text) == (name == "own")


def test_the_page_of_a_training_has_curves_settings_and_the_command(done, where):
    text, _ = page(where, "own")
    assert "Validation measures" in text and "best: " in text
    assert "max_doc_tokens: 256" in text
    command = re.search(r"<code>(ranker train [^<]*)</code>", text).group(1)
    assert "encoder=tiny" in command and "trainer.max_steps=4" in command and "hydra." not in command


def test_a_page_can_be_left_out(done, where):
    assert not (where / "dev/report.html").exists() and (where / "dev/search.json").is_file()
    for name in ("quiet", "second"):  # an evaluation, and a training with its test
        assert (where / name / "evaluation").is_dir()
        assert not (where / name / "report.html").exists() and not (where / name / "pictures").exists()


def test_a_comparison_is_stored(done, where, small_files):
    content = json.loads((where / "compared/comparison.json").read_text())[small_files.name]
    assert list(content["means"]) == ["own", "bm25", "fused"] and content["queries"] == 8
    assert len(content["comparisons"]) == 3 * len(MEASURES) and len(content["overlap"]) == 3
    text, _ = page(where, "compared")
    assert "corrected over all 12 comparisons" in text and "Overlap of the first 3" in text


def test_run_folders_of_an_evaluation_bring_their_data(done, where, small_files):
    _, (part,) = page(where, "evaluations")
    queries = read_queries(small_files / "queries.tsv")
    assert part["runs"] == ["A", "B"] and all(row[1] == queries[row[0]] for row in part["rows"])
    content = json.loads((where / "evaluations/comparison.json").read_text())[small_files.name]
    assert [entry["delta"] for entry in content["comparisons"]] == [0.0] * 4  # the same model on the same candidates
    assert content["overlap"][0]["share"] == 1.0


def test_a_fused_run_is_a_sum_of_reciprocal_ranks(done, where, small_files):
    runs = [read_run(where / name / f"evaluation/{small_files.name}/run.trec") for name in ("own", "bm25")]
    fused = read_run(where / "fused/run.trec")
    assert fused.keys() == runs[0].keys() | runs[1].keys()
    for query_id, docs in fused.items():
        expected = dict.fromkeys(docs, 0.0)
        for run in runs:
            for rank, doc_id in enumerate(sorted(run[query_id], key=run[query_id].get, reverse=True), 1):
                expected[doc_id] += 1 / (60 + rank)
        assert docs == pytest.approx(expected, abs=1e-7)  # ties are separated by the smallest steps of float32
    assert json.loads((where / "fused/fusion.json").read_text())["weights"] == [1.0, 1.0]


def test_tuned_weights_are_recorded(done, where):
    content = json.loads((where / "tuned/fusion.json").read_text())
    assert content["weights"] == [0.5, 0.5] and content["tuning"]["queries"] == 8  # twice the same run
    assert [trial["weights"] for trial in content["tuning"]["trials"]] == [[0, 1], [0.5, 0.5], [1, 0]]


def test_a_fused_run_is_a_first_stage(done, where, small_files):
    fused = read_run(where / "fused/run.trec")
    again = read_run(where / f"third/evaluation/{small_files.name}/run.trec")
    best = {query_id: set(list(docs)[:5]) for query_id, docs in fused.items()}
    assert {query_id: set(docs) for query_id, docs in again.items()} == best
    trained = read_run(where / f"second/evaluation/{small_files.name}/run.trec")
    candidates = read_run(where / "all/run.trec")
    assert {query_id: set(docs) for query_id, docs in trained.items()} == {
        f"q{i}": set(list(candidates[f"q{i}"])[:8]) for i in range(32, 40)
    }


def test_a_full_disk_is_one_line(done, forks, where, small_files):
    """A limit of 12,000 bytes a file stands for the full disk; only the report is larger."""
    a = f"run=own/evaluation/{small_files.name}/run.trec"
    qrels = f"qrels={small_files / 'qrels.test.txt'}"
    full = forks.run("evaluate.py", a, qrels, "hydra.run.dir=full", cwd=where, limit=12_000)
    assert full.code == 1 and "Traceback" not in full.out
    assert full.out.splitlines()[-1].startswith("error: ") and "full/report.html: expected a place" in full.out
    assert not (where / "full/report.html").exists() and not list((where / "full").glob(".*partial"))
    assert (where / "full/evaluation/run/metrics.json").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a word", "error: report.depth: "),
        ("no judgements", "error: qrels: expected judgements for these runs, got none; set qrels=FILE or data=..."),
        ("one run", "error: runs: expected a list of 2 to 10 paths, as [A,B]; got "),
        ("no run", "with no run; name a run file or a run folder"),
        ("other weights", "error: weights: expected 2 numbers, at least one above 0, such as [0.7,0.3]; got [1, 2, 3]"),
        ("other queries", "error: tune.qrels: expected judgements of queries of the runs, got "),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(done, name, message):
    result = done[name]
    assert result["code"] == 1 and message in result["err"] and "Traceback" not in result["err"]
    assert result["left"] == []
