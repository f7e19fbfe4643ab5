"""Files that are whole or not there, and checksums: what is compared, when, by whom, and how a change is accepted."""

import gzip
import json
import os
import subprocess
import sys
import zlib

import pytest

from ranker.errors import CheckpointError, DataError
from ranker.files import checksums
from ranker.files.__main__ import main
from ranker.files.checksums import SUMS, checksum, verify, verify_folder, write_sums, zip_fault
from ranker.files.folders import write_folder
from ranker.files.writing import write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("binary", [False, True])
def test_a_file_appears_whole_at_the_end_of_the_block(tmp_path, name, binary):
    path = tmp_path / "new" / name
    with write_whole(path, binary) as file:
        file.write(b"one\ntwo\n" if binary else "one\ntwo\n")
        assert not path.exists()
    content = path.read_bytes()
    assert (gzip.decompress(content) if name.endswith(".gz") else content) == b"one\ntwo\n"
    assert names(path.parent) == [name]


def test_two_processes_do_not_share_a_temporary_name(tmp_path):
    path = tmp_path / "a.txt"
    with write_whole(path) as file:
        file.write("of the first")
        code = (
            "from ranker.files.writing import write_whole\n"
            f"with write_whole({str(path)!r}) as file: file.write('of the second')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=checksums.__file__.rsplit("/", 3)[0])
        assert path.read_text() == "of the second"
    assert path.read_text() == "of the first" and names(tmp_path) == ["a.txt"]


def test_a_folder_appears_with_its_checksums_and_what_a_kill_left_goes(tmp_path):
    left = tmp_path / ".7.data.partial"
    left.mkdir()
    (left / "x").write_text("half")
    with write_folder(tmp_path / "data") as partial:
        (partial / "a.bin").write_bytes(b"123456789")
        (partial / "inner").mkdir()
        (partial / "inner" / "b.txt").write_text("")
        assert not (tmp_path / "data").exists()
    assert names(tmp_path) == ["data"]
    # CRC-32 of "123456789" is the check value that every definition of the checksum gives
    assert json.loads((tmp_path / "data" / SUMS).read_text()) == {
        "a.bin": {"bytes": 9, "crc32": 0xCBF43926},
        "inner/b.txt": {"bytes": 0, "crc32": 0},
    }
    with pytest.raises(KeyboardInterrupt), write_folder(tmp_path / "data") as partial:
        (partial / "a.bin").write_bytes(b"other")
        raise KeyboardInterrupt
    assert (tmp_path / "data" / "a.bin").read_bytes() == b"123456789" and names(tmp_path) == ["data"]


def test_a_large_file_has_the_checksum_of_its_pieces(tmp_path):
    content = os.urandom(3 * checksums.CHUNK + 17)
    (tmp_path / "a").write_bytes(content)
    assert checksum(tmp_path / "a") == {"bytes": len(content), "crc32": zlib.crc32(content)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"123456789")
    (tmp_path / "b.bin").write_bytes(b"abc")
    write_sums(tmp_path)
    return tmp_path


def test_a_file_is_read_once_in_a_process_and_again_when_it_changes(folder, monkeypatch):
    read = []
    monkeypatch.setattr(checksums, "checksum", lambda path: read.append(path.name) or checksum(path))
    verify_folder(folder)
    verify_folder(folder)
    assert sorted(read) == ["a.bin", "b.bin"]
    (folder / "a.bin").write_bytes(b"123456780")
    with pytest.raises(
        DataError, match=r"a.bin: expected CRC-32 cbf43926, got .*; the file is damaged; if you changed it on purpose"
    ):
        verify_folder(folder)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_only_the_first_process_of_a_machine_reads_all_bytes_and_each_compares_sizes(folder, monkeypatch, variable):
    (folder / "a.bin").write_bytes(b"123456780")
    monkeypatch.setenv(variable, "1")
    verify_folder(folder)
    (folder / "b.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"b.bin: expected 3 bytes, got 2"):
        verify_folder(folder)
    monkeypatch.setenv(variable, "0")
    with pytest.raises(DataError, match=r"a.bin: expected CRC-32"):
        verify_folder(folder, "a.bin")


def test_a_change_on_purpose_is_accepted_by_a_command(folder, capsys):
    (folder / "a.bin").write_bytes(b"changed by hand")
    (folder / "b.bin").unlink()
    with pytest.raises(CheckpointError, match=f"run python -m ranker.files {folder} to accept it"):
        verify_folder(folder, error=CheckpointError)
    assert main([str(folder)]) == 0
    assert "accepted 1 files as they are" in capsys.readouterr().out
    verify_folder(folder)
    assert list(json.loads((folder / SUMS).read_text())) == ["a.bin"]
    assert main([str(folder / "nowhere")]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_folder_without_checksums_is_accepted_and_files_can_be_added_to_the_list(folder):
    (folder / "c.bin").write_bytes(b"of another program")
    verify_folder(folder)
    write_sums(folder, ["c.bin"])
    assert list(json.loads((folder / SUMS).read_text())) == ["a.bin", "b.bin", "c.bin"]
    (folder / SUMS).unlink()
    (folder / "a.bin").write_bytes(b"edited")
    verify_folder(folder)


@pytest.mark.parametrize(
    "sums", ["", "[", "[1]", '{"../a": {"bytes": 1, "crc32": 1}}', '{"a.bin": 3}', '{"a.bin": {"bytes": 9}}']
)
def test_an_unreadable_list_is_named(folder, sums):
    (folder / SUMS).write_text(sums)
    with pytest.raises(DataError, match=f"{folder}/{SUMS}: expected the sizes and checksums"):
        verify_folder(folder)


def test_a_listed_checksum_that_is_no_number_is_named(folder):
    with pytest.raises(DataError, match=r"a.bin: expected a readable file, got an unreadable checksum"):
        verify(folder, {"a.bin": {"bytes": 9, "crc32": "x"}})


def test_a_zip_archive_is_compared_by_all_processes_of_a_run(tmp_path, monkeypatch):
    import zipfile

    monkeypatch.setenv("LOCAL_RANK", "1")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("part", b"123456789")
    assert zip_fault(tmp_path / "a.zip") is None
    (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes().replace(b"123456789", b"123456780"))
    assert zip_fault(tmp_path / "a.zip") == "one whose part part is damaged"
    assert zip_fault(tmp_path / "b.zip") == "no such file"
