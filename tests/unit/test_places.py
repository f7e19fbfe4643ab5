"""Unusable paths and missing data give a one-line error before any work."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.config.check import check
from ranker.data.trec import write_run
from ranker.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]


def cache_faults(cache_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check(OmegaConf.create({"cache_dir": str(cache_dir)}))
    return str(caught.value)


def test_a_cache_that_is_a_file_or_a_broken_link(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for inner in ("file", "file/deep/er"):
        assert f"where {str(tmp_path / 'file')!r} is a file" in cache_faults(tmp_path / inner)
    assert "is a broken link" in cache_faults(tmp_path / "link")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user for a moment")
def test_a_cache_of_somebody_else_or_without_the_right_to_write(tmp_path):
    (tmp_path / "roots").mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        for inner in ("roots", "roots/new"):
            assert f"where {str(tmp_path / 'roots')!r} is not writable for this user" in cache_faults(tmp_path / inner)
    finally:
        os.seteuid(0)
    check(OmegaConf.create({"cache_dir": str(tmp_path / "roots/new")}))
    assert not (tmp_path / "roots/new").exists()


def in_words(error: OSError, capsys) -> str:
    with pytest.raises(SystemExit) as stopped, entry.user_errors():
        raise error
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_place_s_error_is_one_line_and_a_bug_s_keeps_its_traceback(tmp_path, capsys):
    for number in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT):
        line = in_words(OSError(number, os.strerror(number), str(tmp_path)), capsys)
        assert line.startswith(f"error: {tmp_path}: expected ") and os.strerror(number) in line
    with pytest.raises(FileNotFoundError), entry.user_errors():
        Path(tmp_path / "forgotten").read_text()


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A limit on a file's size stands for the full disk: the error comes from the same call."""
    code = f"""
import resource, signal
from pathlib import Path
from ranker.data.trec import write_run
from ranker.cli.entry import user_errors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with user_errors():
    write_run({str(tmp_path / "out.trec")!r}, {{"q": {{f"d{{i}}": float(i) for i in range(5000)}}}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'out.trec'}: expected ") and "File too large" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data=files", "data.path=nowhere"],
            "data.path: expected a folder with docs.jsonl, queries.tsv and qrels.txt, got '{here}/nowhere'",
        ),
        (["data=ir_datasets", "data.train=nowhere"], "ir_datasets: expected an id that ir_datasets knows, got"),
        (
            ["data=files", "data.path=1e3"],
            "data.path: expected a folder with docs.jsonl, queries.tsv and qrels.txt, got '{here}/1e3'",
        ),
        (["loss=null"], "loss: expected the name of a file in conf/loss/, got null"),
    ],
)
def test_what_is_not_there_is_said_without_importing_torch(tmp_path, arguments, message):
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        done.returncode == 1
        and len(errors) == 1
        and message.replace("{here}", str(tmp_path)) in errors[0]
        and "Traceback" not in done.stderr
    )
    assert not {"torch", "lightning", "transformers"} & imported
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def test_measuring_a_run_file_imports_no_library_of_models_or_pictures(tmp_path):
    (tmp_path / "run.trec").write_text("q1 Q0 d1 1 2.0 t\nq1 Q0 d2 2 1.0 t\n")
    (tmp_path / "qrels.txt").write_text("q1 0 d2 1\n")
    command = [sys.executable, "-X", "importtime", str(ROOT / "evaluate.py"), "run=run.trec", "qrels=qrels.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "0.5000" in done.stdout, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"ir_measures", "ranker.evaluation.report"} <= imported
    assert not {"torch", "lightning", "transformers", "scipy", "matplotlib", "pandas", "asyncio"} & imported


def test_writing_into_a_file_as_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a place to write to"):
        write_run(tmp_path / "file" / "out.trec", {"q": {"d": 1.0}})
