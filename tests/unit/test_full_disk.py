"""Full and read-only disks: one line, nothing half-written, nothing of the user's lost; with room it goes on."""

import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ranker.cli import entry
from ranker.errors import CheckpointError, DataError
from ranker.files.space import no_room, reserve
from ranker.probing import pictures
from ranker.probing.blocks import BlockStore
from ranker.training.checkpoint_files import WholeFiles, fault, read_checkpoint
from ranker.training.run_writer import log_to
from tests.unit.test_damage import STORED

WRITERS = sorted(set(STORED) - {"dump"})  # a dump that can't be written is a warning: the error is the step's
PAGE = 4096
DISK = 4096  # pages


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, 16 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK * PAGE}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def files_of_at_most(size: int):
    """A limit of the system on the size of written files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def only(left: int, disk: Path):
    """A disk with only so many pages left."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - left * PAGE)
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(disk: Path):
    """A disk that can't be written to."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def error_of(make, folder: Path, capsys) -> str | None:
    """The only line that a user gets, with exit code 1; None if all was written."""
    capsys.readouterr()
    try:
        with entry.user_errors():
            make(folder)
            return None
    except SystemExit as end:
        assert end.code == 1
    out = capsys.readouterr().err
    (line,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in out and ": expected " in line
    return line


def halves(folder: Path) -> list[str]:
    """Unfinished files in a folder."""
    return [path.name for path in folder.rglob("*") if path.suffix in (".partial", ".building")]


def sizes(folder: Path) -> list[int]:
    return sorted({path.stat().st_size for path in folder.rglob("*") if path.is_file()} - {0})


def written_later(make, folder: Path, expected: str) -> None:
    """Once the disk has room again, the same writer finishes what the full disk interrupted, or starts again."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    assert make(folder).read(folder) == expected


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_can_t_grow(name, tmp_path, capsys):
    make, user = STORED[name], tmp_path / "mine.txt"
    user.write_text("mine")
    expected = make(tmp_path / "whole/x").read(tmp_path / "whole/x")
    every = sizes(tmp_path / "whole")
    lines = []
    for number, size in enumerate(sorted({every[0], every[len(every) // 2], every[-1]})):
        place = tmp_path / str(number)
        with files_of_at_most(size - 1):
            lines.append(error_of(make, place / "x", capsys))
        assert not halves(tmp_path)
        written_later(make, place / "x", expected)
    assert lines[-1] is not None, "the largest file can't be written"
    assert all(line is None or str(tmp_path) in line for line in lines), lines
    assert user.read_text() == "mine"


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full(name, disk, capsys):
    make, user = STORED[name], disk / "mine.txt"
    user.write_text("mine")
    before = shutil.disk_usage(disk).used
    expected = make(disk / "whole/x").read(disk / "whole/x")
    pages = (shutil.disk_usage(disk).used - before) // PAGE
    shutil.rmtree(disk / "whole")
    lines = []
    for left in sorted({0, pages // 2, pages - 1}):
        with only(left, disk):
            lines.append(error_of(make, disk / "part/x", capsys))
        assert not halves(disk)
        written_later(make, disk / "part/x", expected)
        shutil.rmtree(disk / "part")
    assert lines[0] is not None and all(line is None or str(disk) in line for line in lines), lines
    assert user.read_text() == "mine"


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_read_only(name, disk, capsys):
    (disk / "x").mkdir()
    (disk / "x/mine.txt").write_text("mine")
    with read_only(disk):
        line = error_of(STORED[name], disk / "x/new", capsys)
    assert line is not None and str(disk) in line and "Read-only file system" in line
    assert [path.name for path in disk.rglob("*")] == ["x", "mine.txt"]


def test_the_first_checkpoint_and_a_later_one(tmp_path):
    path, content = tmp_path / "run/checkpoints/last.ckpt", {"state_dict": {"w": torch.ones(9999)}, "global_step": 1}
    with files_of_at_most(9999), pytest.raises(CheckpointError) as first:
        WholeFiles().save_checkpoint(content, path)
    assert str(first.value) == (
        f"{path}: expected to write a checkpoint, got 'File too large'; there is no earlier checkpoint; "
        "make room, then start again"
    )
    assert list(path.parent.iterdir()) == []
    WholeFiles().save_checkpoint(content, path)
    with (
        files_of_at_most(9999),
        pytest.raises(CheckpointError, match=r"the previous checkpoint is kept; .* resume=true"),
    ):
        WholeFiles().save_checkpoint({**content, "global_step": 2}, path)
    assert fault(path) is None and read_checkpoint(path)["global_step"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_blocks_that_were_stored_before_the_disk_was_full_are_kept(tmp_path):
    path = tmp_path / "blocks.sqlite"
    store = BlockStore(path)
    store.put([("a", {"bits": np.arange(5.0)})])
    with (
        files_of_at_most(path.stat().st_size + 5000),
        pytest.raises(DataError, match=rf"{path}: expected a place to write to, .*finished blocks are kept"),
    ):
        store.put([("b", {"bits": np.arange(50000.0)})])
    assert store.get("a")["bits"].tolist() == [0, 1, 2, 3, 4] and store.get("b") is None
    store.close()


def test_a_probe_s_pictures_are_whole_or_absent(disk, capsys):
    def draw(folder):
        pictures.save(pictures.heat_map({"tf": {0: 1.0, 1: 2.0}}, "title"), folder, "heat")

    draw(disk / "whole")
    svg = -(-(disk / "whole/pictures/heat.svg").stat().st_size // PAGE)
    shutil.rmtree(disk / "whole")
    for left, missing, there in ((svg - 1, "heat.svg", []), (svg + 1, "heat.png", ["heat.svg"])):
        with only(left, disk):
            line = error_of(draw, disk / "run", capsys)
        assert line is not None and line.startswith(f"error: {disk / 'run/pictures' / missing}: expected a place")
        assert [path.name for path in (disk / "run/pictures").iterdir()] == there
        shutil.rmtree(disk / "run")


def test_a_mapped_file_has_its_room_before_it_is_filled(disk):
    """Without it, the system kills the process at the first page that finds no room."""
    before = shutil.disk_usage(disk).used
    reserve(disk / "a", 5 * PAGE)
    assert (disk / "a").read_bytes() == bytes(5 * PAGE)
    assert shutil.disk_usage(disk).used - before >= 5 * PAGE
    with only(4, disk), pytest.raises(OSError, match="No space left"):
        reserve(disk / "b", 5 * PAGE)
    assert not (disk / "b").exists()
    reserve(disk / "empty", 0)
    assert (disk / "empty").read_bytes() == b""


def test_a_log_on_a_full_disk_is_one_warning(disk, capsys):
    import logging

    handler = log_to(disk / "train.log")
    log = logging.getLogger("of a test")
    log.setLevel(logging.INFO)
    try:
        with only(0, disk):
            for _ in range(3):
                log.info("a line")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {disk / 'train.log'}: expected room for the log, got 'No space left on device'")


def test_other_errors_are_no_full_disk():
    assert no_room(OSError("without a number")) is None
    assert no_room(PermissionError(13, "Permission denied")) is None
    assert no_room(RuntimeError("no such file (os error 2)")) is None
    assert no_room(RuntimeError("I/O error: (os error 28)")) == "No space left on device"


def test_a_library_s_thread_on_a_full_disk_is_one_line(disk, capsys):
    from torch.utils.tensorboard import SummaryWriter

    with only(1, disk), pytest.raises(SystemExit), entry.user_errors():
        writer = SummaryWriter(str(disk / "events"), max_queue=1, flush_secs=1)
        for number in range(2000):
            writer.add_text("text", "word " * 500, number)
            writer.flush()
    out = capsys.readouterr().err
    assert "Traceback" not in out and len([line for line in out.splitlines() if line.startswith("error: ")]) == 1
    assert "warning: " in out and "expected room to write to, got 'No space left on device'" in out
