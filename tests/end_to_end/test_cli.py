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
