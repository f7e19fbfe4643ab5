"""Mistakes in a command line: one line with place, expected, got and fix; exit code 1; no traceback, no files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, run, run_all

WRONG = [
    (["trainer.device=2"], "trainer.device: unknown key; did you mean trainer.devices?"),  # PC-85
    (["+trainer.foo=1"], "trainer.foo"),
    (["trainer.max_epochs=abc"], "trainer.max_epochs: expected an integer, got 'abc'"),
    (["model=monobort"], "model: expected one of"),
    (["loss=foo"], "loss: expected one of"),
    (
        ["passages.length=64"],
        "passages.length: unknown key; it is a key of conf/passages/: choose a file there, too, as",
    ),
    (["model.pooling_=cls"], "model.pooling_: unknown key"),
    (["+model.poolin=cls"], "model.poolin: unknown key for ranker.models.monobert.MonoBERT; did you mean pooling?"),
    (["optim.lr=fast"], "optim.lr"),
    (["monitor=val/nDCG@5"], "monitor: expected one of val/nDCG@10"),
    (["measures=[nDGC@10]"], "nDGC@10"),
    (["batch.docs=0"], "batch.docs: expected at least 1, got 0"),
    (
        ["model=dpr", "batch.docs=1", "model.in_batch_negatives=false"],
        "batch.docs: expected more than batch.positives=1, got 1",
    ),
    (["batch.docs=1"], "batch.docs: expected more than batch.positives=1, got 1"),
    (["trainer.accelerator=banana"], "trainer.accelerator: expected one of auto"),
    (["trainer.fast_dev_run=true"], "trainer.fast_dev_run: not supported"),
    (
        ["trainer.strategy=fsdp", "encoder.compile=true"],
        "trainer.strategy: expected auto or ddp with ",
    ),
    (["trainer.precision=16-mixed"], "trainer.precision: 16-mixed is refused"),
    (["trainer.overfit_batches=1"], "trainer.overfit_batches: not supported"),
    (["data=files"], "data.path: expected a value, got none; set data.path=..."),
    (["data=files", "data.path=no/such/folder"], "no/such/folder"),
    (["checkpoint=nowhere"], "checkpoint: expected a file or folder, got 'nowhere', which does not exist"),
    (["resume=true"], "resume: expected checkpoint=RUN_FOLDER beside resume=true"),
    (["model._target_=os.system"], "model._target_: expected a name that starts with ranker."),
    (["checkpoint=epoch=3-step=100.ckpt"], "quote a value that holds '='"),  # PC-79
    (["encoder.layers=99"], "encoder.layers: expected 1 to 2"),
]


@pytest.fixture(scope="module")
def wrong_results(forks, tmp_path_factory):
    """Results of `train.py` with each mistake of `WRONG`, run in one process."""
    return run_all(
        {" ".join(arguments): ["train.py", *arguments] for arguments, _ in WRONG},
        tmp_path_factory.mktemp("wrong"),
        forks=forks,
    )


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_pc79_pc85_a_mistake_is_one_line(wrong_results, arguments, message):
    done = wrong_results[" ".join(arguments)]
    assert message in done["err"]
    assert "Traceback" not in done["out"]
    assert done["code"] == 1
    assert len([line for line in done["err"].splitlines() if line.startswith("error: ")]) == 1
    assert "Error executing job" not in done["err"]
    assert not [path for path in done["left"] if ".hydra" not in Path(path).parts and ".cache" not in Path(path).parts]


BROKEN = {
    "nothing": ([], "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got neither"),
    "no qrels": (["run=good.trec"], "qrels: expected the judgements for the file of run=, got none"),
    "split": (["run=good.trec", "qrels=qrels.txt", "split=foo"], "split: expected one of test, val, train; got 'foo'"),
    "nan": (["run=nan.trec", "qrels=qrels.txt"], "nan.trec:1: "),
    "twice": (["run=twice.trec", "qrels=qrels.txt"], "twice.trec:2: "),
    "short": (["run=short.trec", "qrels=qrels.txt"], "short.trec:1: expected 6 columns"),
    "empty": (["run=empty.trec", "qrels=qrels.txt"], "empty.trec"),
    "contradicting": (["run=good.trec", "qrels=contradicting.txt"], "contradicting.txt:2: "),
    "file as checkpoint": (["checkpoint=qrels.txt"], "checkpoint: expected a run folder or a model folder"),
    "last of a model": (["checkpoint=model", "weights=last"], "weights: expected 'best', got 'last': "),
}
FILES = {
    "good.trec": "q1 Q0 d1 1 2.0 t\n",
    "nan.trec": "q1 Q0 d1 1 nan t\n",
    "twice.trec": "q1 Q0 d1 1 2.0 t\nq1 Q0 d1 2 1.0 t\n",
    "short.trec": "q1 Q0 d1\n",
    "empty.trec": "",
    "qrels.txt": "q1 0 d1 1\n",
    "contradicting.txt": "q1 0 d1 1\nq1 0 d1 0\n",
    "model/config.json": "{}",
    "ids.qrels": "1 0 7 1\n01 0 7 1\n",
    "ids.trec": "1 Q0 7 1 1.0 t\n01 Q0 07 1 1.0 t\n",
    "other.trec": "q9 Q0 d1 1 2.0 t\n",
}


@pytest.fixture(scope="module")
def evaluated(forks, tmp_path_factory, small_files):
    """The working directory, and results of `evaluate.py` on all files of `FILES`, run in one process."""
    where = tmp_path_factory.mktemp("evaluated")
    for name, text in FILES.items():
        (where / name).parent.mkdir(exist_ok=True)
        (where / name).write_text(text)
    commands = {name: ["evaluate.py", *arguments] for name, (arguments, _) in BROKEN.items()}
    commands["last of a model"] += ["data=files", f"data.path={small_files}"]
    commands["ids"] = ["evaluate.py", "run=ids.trec", "qrels=ids.qrels", "measures=[AP,RR@10]", "name=ids"]
    commands["other"] = ["evaluate.py", "run=other.trec", "qrels=qrels.txt", "measures=[AP]", "name=other"]
    return where, run_all(commands, where, forks=forks)


@pytest.mark.parametrize("name", list(BROKEN))
def test_pc07_pc08_a_broken_file_is_one_line(evaluated, name):
    where, results = evaluated
    assert results[name]["code"] == 1
    assert [BROKEN[name][1] in line for line in results[name]["out"].splitlines() if line.startswith("error: ")] == [
        True
    ]
    assert "Traceback" not in results[name]["out"]
    assert not list(where.glob("outputs/evaluate/*/[!.]*"))  # the successful commands use other names


def test_pc22_ids_that_look_like_numbers_are_texts(evaluated):
    """Query 1 finds its doc 7; query 01 finds 07, which is another doc."""
    (folder,) = evaluated[0].glob("outputs/ids/*/evaluation/ids")
    assert json.loads((folder / "metrics.json").read_text())["measures"] == {"AP": 0.5, "RR@10": 0.5}
    rows = [json.loads(line) for line in (folder / "per_query.jsonl").read_text().splitlines()]
    assert {row["query_id"]: row["measures"]["AP"] for row in rows} == {"1": 1.0, "01": 0.0}


def test_pc23_a_run_for_other_queries_is_said_to_be_one(evaluated):
    (folder,) = evaluated[0].glob("outputs/other/*/evaluation/other")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["measures"] == {"AP": 0.0} and metrics["num_queries"] == 1
    assert any(warning.startswith("0 of 1 judged queries found in the run") for warning in metrics["warnings"])


def test_all_faults_come_at_once(tmp_path):
    done = run("train.py", "batch.docs=0", "batch.queries=0", "trainer.strategy=x", "+model.bar=1", cwd=tmp_path)
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "model.bar", "trainer.strategy", "batch.queries", "batch.docs",
    ]  # fmt: skip


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_help_and_check_import_no_torch(script):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / script), "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0
    assert "model" in done.stdout
    assert not {"torch", "lightning", "transformers"} & {
        line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()
    }
    done = subprocess.run(
        [sys.executable, "-c", "import ranker, sys; sys.exit('torch' in sys.modules)"], cwd=ROOT, check=False
    )
    assert done.returncode == 0


def test_help_names_every_choice_and_shows_the_keys_of_a_chosen_one():
    shown = run("train.py", "model=dpr", "--help").stdout
    for path in (ROOT / "conf/loss").glob("*.yaml"):
        assert path.stem in shown
    assert "lce*" in shown and "splade_tiny*" in shown  # the defaults
    assert "save_every_steps: 500 # optimizer steps between" in shown  # with their meaning
    assert "temperature: 0.05" in shown and "taught_dpr" in shown
    assert "index:" not in shown and "index: binary, " in run("search.py", "-h").stdout
