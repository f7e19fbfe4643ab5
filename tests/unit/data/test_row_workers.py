"""Rows that several processes parse give the files that one process gives, and the same errors."""

import json
import os
import random
import signal

import pytest

from ranker.data import row_files
from ranker.data.row_build import RowSources, build_rows
from ranker.data.row_pairs import Relevant
from ranker.data.row_workers import in_order
from ranker.errors import DataError


def double(number: int) -> int:
    return 2 * number


def failing(number: int) -> int:
    """Fail at 7 with an error and at 9 by the process's death."""
    if number == 7:
        raise DataError("7: no")
    if number == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_order_and_items_are_read_a_few_ahead(workers):
    read = []

    def items():
        for number in range(40):
            read.append(number)
            yield number

    ahead = []
    for place, result in enumerate(in_order(double, items(), workers)):
        assert result == 2 * place
        ahead.append(len(read) - place)
    assert len(ahead) == 40 and max(ahead) == (1 if workers == 0 else workers + 2)


def test_an_error_comes_at_its_place_and_a_dead_process_is_one_line():
    found = []
    with pytest.raises(DataError, match=r"^7: no$"):
        for result in in_order(failing, range(9), 2):
            found.append(result)
    assert found == list(range(7))
    with pytest.raises(DataError, match=r"^rows: expected processes that parse rows, got one that ended; ") as caught:
        list(in_order(failing, [8, 9, 10], 2))
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_files, "CHUNK", 7)


def write_rows(folder, suffix, rows):
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path, row_group_size=11)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_two_processes_write_the_same_bytes(tmp_path, small_chunks, suffix):
    rng = random.Random(1)
    rows = [
        {"query": f"q{rng.randrange(20)}", "docs": [f"d{rng.randrange(30)}", f"e{i}"], "scores": [rng.random(), 1.0]}
        for i in range(60)
    ]
    path, contents = write_rows(tmp_path, suffix, rows), {}
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        build_rows(RowSources({"train": [path]}, workers=workers), folder, Relevant())
        contents[workers] = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert contents[2] == contents[0] and len(contents[0]) > 8


def test_the_first_faulty_row_is_named_whichever_process_reads_it(tmp_path, small_chunks):
    rows = [{"query": f"q{i}", "docs": ["a", "b"], "scores": [1.0, 2.0]} for i in range(60)]
    rows[40]["scores"], rows[52]["scores"] = [1.0], [1.0, None]
    path = write_rows(tmp_path, ".jsonl", rows)
    messages = []
    for workers in (0, 2):
        (tmp_path / str(workers)).mkdir()
        with pytest.raises(DataError) as caught:
            build_rows(RowSources({"train": [path]}, workers=workers), tmp_path / str(workers), Relevant())
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and messages[0].startswith(f"{path}:41: ")
