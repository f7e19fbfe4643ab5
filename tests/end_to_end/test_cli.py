"""What a user types wrong: one line that says where, expected, got, fix; exit 1; no traceback; nothing left behind."""

import subprocess
import sys

import pytest
from commands import ROOT, run

WRONG = [
    (["trainer.device=2"], "trainer.device: unknown key; did you mean trainer.devices?"),  # PC-85
    (["+trainer.foo=1"], "trainer.foo"),
    (["trainer.max_epochs=abc"], "trainer.max_epochs: expected an integer, got 'abc'"),
    (["model=monobort"], "model: expected one of"),
    (["loss=foo"], "loss: expected one of"),
    (["model.pooling_=cls"], "model.pooling_: unknown key"),
    (["+model.poolin=cls"], "model.poolin: unknown key for ranker.models.monobert.MonoBERT; did you mean pooling?"),
    (["optim.lr=fast"], "optim.lr"),
    (["monitor=val/nDCG@5"], "monitor: expected one of val/nDCG@10"),
    (["measures=[nDGC@10]"], "nDGC@10"),
    (["batch.docs=0"], "batch.docs: expected at least 1, got 0"),
    (["batch.docs=1"], "batch.docs: expected more than batch.positives=1, got 1"),
    (["trainer.accelerator=banana"], "trainer.accelerator: expected one of auto"),
    (["trainer.fast_dev_run=true"], "trainer.fast_dev_run: not supported"),
    (["trainer.strategy=fsdp"], "trainer.strategy: expected one of auto, ddp"),
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


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_mistake_is_one_line(tmp_path, arguments, message):
    done = run("train.py", *arguments, cwd=tmp_path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Error executing job" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and ".hydra" not in path.parts and ".cache" not in path.parts]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got neither"),
        (["run=good.trec"], "qrels: expected the judgements of run=, got none"),
        (["run=good.trec", "qrels=qrels.txt", "split=foo"], "split: expected one of test, val, train; got 'foo'"),
        (["run=nan.trec", "qrels=qrels.txt"], "nan.trec:1: "),
        (["run=twice.trec", "qrels=qrels.txt"], "twice.trec:2: "),
        (["run=short.trec", "qrels=qrels.txt"], "short.trec:1: expected 6 columns"),
        (["run=empty.trec", "qrels=qrels.txt"], "empty.trec"),
        (["run=good.trec", "qrels=contradicting.txt"], "contradicting.txt:2: "),
        (["checkpoint=qrels.txt"], "checkpoint: expected a run folder or a model folder"),
    ],
)
def test_pc07_pc08_a_broken_file_is_one_line(tmp_path, arguments, message):
    for name, text in {
        "good.trec": "q1 Q0 d1 1 2.0 t\n", "nan.trec": "q1 Q0 d1 1 nan t\n", "twice.trec": "q1 Q0 d1 1 2.0 t\nq1 Q0 d1 2 1.0 t\n",
        "short.trec": "q1 Q0 d1\n", "empty.trec": "", "qrels.txt": "q1 0 d1 1\n", "contradicting.txt": "q1 0 d1 1\nq1 0 d1 0\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    done = run("evaluate.py", *arguments, cwd=tmp_path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode == 1
    assert not list(tmp_path.rglob("metrics.json"))
    assert not list(tmp_path.rglob("config.yaml")) or all(".hydra" in path.parts for path in tmp_path.rglob("config.yaml"))


def test_all_faults_come_at_once(tmp_path):
    done = run("train.py", "batch.docs=0", "batch.queries=0", "trainer.strategy=x", "+model.bar=1", cwd=tmp_path)
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "model.bar", "trainer.strategy", "batch.queries", "batch.docs",
    ]  # fmt: skip


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_help_and_check_import_no_torch(script):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / script), "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0
    assert "model" in done.stdout
    assert not {"torch", "lightning", "transformers"} & {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    done = subprocess.run([sys.executable, "-c", "import ranker, sys; sys.exit('torch' in sys.modules)"], cwd=ROOT, check=False)
    assert done.returncode == 0
