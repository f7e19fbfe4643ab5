"""TREC files: what is read, what is refused with which message, and that files are written whole or not at all."""

import gzip
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ranker.data import trec
from ranker.data.ranking import rank_docs
from ranker.data.trec import (
    iter_run,
    read_candidates,
    read_qrels,
    read_run,
    write_qrels,
    write_run,
)
from ranker.errors import DataError
from ranker.files.writing import write_whole

RUN_READERS = [read_run, lambda path: list(iter_run(path)), read_candidates]


def file(tmp_path: Path, text: str | bytes, name: str = "file.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def run_lines(text: str) -> str:
    """`q1 d1 3.0 / q1 d2 2.0` as the lines of a run file."""
    rows = [row.split() for row in text.split(" / ")]
    return "".join(f"{query} Q0 {doc} {i} {score} tag\n" for i, (query, doc, score) in enumerate(rows, 1))


def fault(read, path: Path) -> str:
    with pytest.raises(DataError) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


# what is accepted
# -------------------------------------------------------------------------------------------------------------------


def test_qrels_grades_and_ids_stay_what_they_are(tmp_path):
    path = file(tmp_path, "1 0 d1 1\n01 0 d1 -1\n001 0 007 -2\n1\t0\tnull\t+3\n")
    assert read_qrels(path) == {"1": {"d1": 1, "null": 3}, "01": {"d1": -1}, "001": {"007": -2}}


def test_pc22_ids_that_look_like_numbers_are_three_queries(tmp_path):
    path = file(tmp_path, run_lines("01 1 3 / 1 1.0 2 / 001 1e0 1"))
    assert read_run(path) == {"01": {"1": 3.0}, "1": {"1.0": 2.0}, "001": {"1e0": 1.0}}
    assert dict(read_candidates(path)) == {"01": ["1"], "1": ["1.0"], "001": ["1e0"]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_byte_order_mark_crlf_blank_lines_and_no_last_line_feed(tmp_path, pack):
    path = file(tmp_path, pack(b"\xef\xbb\xbfq1 Q0 d1 1 2.5 t\r\n\r\n  q1\tQ0  d2\t2 1e-3 t  \r\n\nq2 Q0 d1 1 -7 t"))
    assert read_run(path) == {"q1": {"d1": 2.5, "d2": 0.001}, "q2": {"d1": -7.0}}
    qrels = file(tmp_path, pack(b"\xef\xbb\xbfq1 0 d1 2\r\n\r\nq2 0 d9 0"))
    assert read_qrels(qrels) == {"q1": {"d1": 2}, "q2": {"d9": 0}}


def test_gzip_is_told_by_its_content(tmp_path):
    assert read_run(file(tmp_path, gzip.compress(run_lines("q1 d1 3").encode()), "a.run")) == {"q1": {"d1": 3.0}}
    assert read_run(file(tmp_path, run_lines("q1 d1 3"), "a.run.gz")) == {"q1": {"d1": 3.0}}


def test_only_ascii_white_space_splits_and_only_line_feeds_end_lines(tmp_path):
    odd = ["a\u00a0b", "a\u2028b", "a\u0085b", "a\x1cb", "a\u3000b", "文書"]
    path = file(tmp_path, "".join(f"q1 Q0 {doc} 1 {9 - i} t\n" for i, doc in enumerate(odd)))
    assert list(read_run(path)["q1"]) == odd
    assert read_candidates(path)["q1"] == odd
    assert list(read_qrels(file(tmp_path, "".join(f"q1 0 {doc} 1\n" for doc in odd)))["q1"]) == odd


def test_runs_and_candidates_come_in_any_line_order(tmp_path):
    path = file(tmp_path, run_lines("q1 d1 1 / q2 d1 5 / q1 d2 2 / q2 d2 7 / q3 x 1 / q1 d3 3"))
    assert read_run(path) == {"q1": {"d1": 1.0, "d2": 2.0, "d3": 3.0}, "q2": {"d1": 5.0, "d2": 7.0}, "q3": {"x": 1.0}}
    candidates = read_candidates(path)
    assert dict(candidates) == {"q1": ["d3", "d2", "d1"], "q2": ["d2", "d1"], "q3": ["x"]}
    assert candidates.to_run() == read_run(path)


def test_candidates_are_ordered_as_trec_eval_does_over_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(trec, "_CHUNK_DOCS", 7)
    generator = np.random.default_rng(0)
    run = {
        f"q{i}": {f"d{doc}": float(generator.integers(0, 4)) for doc in generator.permutation(30)[: i + 1]}
        for i in range(20)
    }
    lines = [f"{query} Q0 {doc} 0 {score} t\n" for query, docs in run.items() for doc, score in docs.items()]
    generator.shuffle(lines)
    candidates = read_candidates(file(tmp_path, "".join(lines)))
    assert dict(candidates) == {query: rank_docs(run[query]) for query in candidates}
    assert candidates.to_run() == {query: run[query] for query in candidates}
    assert len(candidates) == 20


def test_candidates_are_ordered_by_all_digits_not_by_float32(tmp_path):
    path = file(tmp_path, run_lines("q1 d1 16777217.5 / q1 d2 16777217.25"))  # equal in float32
    assert read_candidates(path)["q1"] == ["d1", "d2"]


# what is refused
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", RUN_READERS, ids=["read_run", "iter_run", "read_candidates"])
@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        ("q1 Q0 d2 2 1.0", r":2: expected 6 columns \(query_id Q0 doc_id rank score tag\), got 5: 'q1 Q0 d2 2 1.0'"),
        ("q1 Q0 d 2 2 1.0 t", r":2: expected 6 columns .* got 7"),
        ("q1 Q0 d2 2 high t", r":2: expected a finite number as score, got 'high'"),
        ("q1 Q0 d2 2 nan t", r":2: expected a finite number as score, got 'nan'"),
        ("q1 Q0 d2 2 -inf t", r":2: expected a finite number as score, got '-inf'"),
        ("q1 Q0 d2 2 1e999 t", r":2: expected a finite number as score, got '1e999'"),
        ("q1 Q0 d2 2 1_0 t", r":2: expected a finite number as score, got '1_0'"),
        (b"q1 Q0 d\xff 2 1 t", r":2: expected UTF-8 text, got b'd\\xff'"),
        (b"q\xff Q0 d2 2 1 t", r":2: expected UTF-8 text, got b'q\\xff'"),
    ],
)
def test_broken_run_lines_are_named(tmp_path, read, second_line, complaint):
    second = second_line if isinstance(second_line, bytes) else second_line.encode()
    path = file(tmp_path, b"q1 Q0 d1 1 2.0 t\n" + second + b"\n")
    assert re.search(re.escape(str(path)) + complaint, fault(read, path))


@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        (
            "19335 0 1720389",
            r":2: expected 4 columns \(query_id iteration doc_id relevance\), got 3: '19335 0 1720389'",
        ),
        ("q1 0 d2 relevant", r":2: expected a whole number as relevance, got 'relevant'"),
        ("q1 0 d2 1.5", r":2: expected a whole number as relevance, got '1.5'"),
        ("q1 0 d2 1_0", r":2: expected a whole number as relevance, got '1_0'"),
        ("q1 0 d2 nan", r":2: expected a whole number as relevance, got 'nan'"),
    ],
)
def test_broken_qrels_lines_are_named(tmp_path, second_line, complaint):
    path = file(tmp_path, f"q1 0 d1 1\n{second_line}\n")
    assert re.search(re.escape(str(path)) + complaint, fault(read_qrels, path))


@pytest.mark.parametrize(
    "read", [read_qrels, *RUN_READERS], ids=["read_qrels", "read_run", "iter_run", "read_candidates"]
)
def test_missing_empty_folder_and_broken_gzip(tmp_path, read):
    missing = tmp_path / "no.txt"
    assert fault(read, missing) == f"{missing}: expected a file, got nothing at this path; check the path"
    assert "got a folder" in fault(read, tmp_path)
    for empty in (b"", b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"")):
        assert "got an empty file" in fault(read, file(tmp_path, empty))
    line = "q1 0 d{0} 1\n" if read is read_qrels else "q1 Q0 d{0} 1 -{0} t\n"
    whole = gzip.compress("".join(line.format(i) for i in range(5000)).encode())
    cut = file(tmp_path, whole[: len(whole) // 2], "cut.gz")
    assert re.search(
        r"cut.gz: expected a whole gzip file, got one that breaks after line \d+ .*; copy it again", fault(read, cut)
    )
    wrong = file(tmp_path, whole[:100] + bytes(50) + whole[150:], "wrong.gz")
    assert "whole gzip file" in fault(read, wrong)
    assert "got UTF-16; save it as UTF-8" in fault(read, file(tmp_path, line.format(1).encode("utf-16")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(tmp_path):
    path = file(tmp_path, "q1 0 d1 1\n")
    path.chmod(0)
    assert "check its permissions" in fault(read_qrels, path)


@pytest.mark.parametrize("read", RUN_READERS[:2], ids=["read_run", "iter_run"])
@pytest.mark.parametrize(
    "text", ["q1 d1 3.0 / q1 d1 2.0 / q1 d2 1.0", "q1 d1 3 / q2 d1 3 / q1 d1 3"], ids=["together", "interleaved"]
)
def test_pc07_a_doc_twice_in_a_run_is_refused(tmp_path, read, text):
    path = file(tmp_path, run_lines(text))
    line = 2 if "q2" not in text else 3
    assert (
        fault(read, path)
        == f"{path}:{line}: expected each doc once per query, got doc 'd1' again for query 'q1'; remove one"
    )


def test_repeats_are_seen_however_often_a_query_comes_back(tmp_path):
    rows = [f"q{query} d{doc} {-doc}" for doc in range(6) for query in range(3)]
    path = file(tmp_path, run_lines(" / ".join(rows)))
    assert sum(1 for _ in iter_run(path)) == 18
    path = file(tmp_path, run_lines(" / ".join([*rows, "q1 d0 5"])))
    assert ":19: expected each doc once per query, got doc 'd0' again for query 'q1'" in fault(read_run, path)


def test_pc07_a_doc_twice_among_candidates_is_kept_once_with_a_warning(tmp_path, caplog):
    path = file(tmp_path, run_lines("q0 d1 1 / q1 d1 2.0 / q1 d2 2.5 / q1 d1 3.0 / q1 d1 3.0 / q2 d1 1"))
    with caplog.at_level(logging.WARNING):
        candidates = read_candidates(path)
    assert candidates.to_run() == {"q0": {"d1": 1.0}, "q1": {"d1": 3.0, "d2": 2.5}, "q2": {"d1": 1.0}}
    assert candidates["q1"] == ["d1", "d2"]
    assert "2 repeated candidates dropped, as for query 'q1'" in caplog.text


def test_pc08_contradicting_judgements_are_refused(tmp_path):
    path = file(tmp_path, "q1 0 d1 1\nq2 0 d1 0\nq1 0 d1 0\n")
    assert fault(read_qrels, path) == (
        f"{path}:3: expected one relevance for query 'q1' and doc 'd1', got 0 after 1 on an earlier line; remove the "
        "wrong one"
    )


def test_pc08_repeated_judgements_collapse_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert read_qrels(file(tmp_path, "q1 0 d1 1\nq1 1 d1 1\nq2 0 d1 0\n")) == {"q1": {"d1": 1}, "q2": {"d1": 0}}
    assert "1 repeated judgements dropped, the first on line 2" in caplog.text


# what is written
# --------------------------------------------------------------------------------------------------------------------


def test_pc19_pc20_a_written_run_is_lossless_and_ordered(tmp_path):
    run = {
        "q1": {
            "dB": 12.34561,
            "dA": 12.34564,
            "d9": 0.1 + 0.2,
            "d10": 0.1 + 0.2,
            "é": 5e-324,
            "z": -1.7976931348623157e308,
        },
        "q2": {"x": 1, "y": np.float32(0.1)},
    }
    write_run(tmp_path / "deep" / "run.trec", run, tag="mine")
    text = (tmp_path / "deep" / "run.trec").read_text()
    assert text.splitlines()[:4] == [
        "q1 Q0 dA 1 12.34564 mine",
        "q1 Q0 dB 2 12.34561 mine",
        "q1 Q0 d9 3 0.30000000000000004 mine",
        "q1 Q0 d10 4 0.30000000000000004 mine",
    ]
    assert text.splitlines()[-1] == "q2 Q0 y 2 0.10000000149011612 mine"
    assert read_run(tmp_path / "deep" / "run.trec") == {"q1": run["q1"], "q2": {"x": 1.0, "y": float(np.float32(0.1))}}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.trec"]


def test_written_gzip_is_the_same_bytes_each_time(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_run(tmp_path / name, {"q1": {"d1": 1.0}})
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"q1 Q0 d1 1 1.0 ranker\n"
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_written_qrels_read_back(tmp_path):
    qrels = {"01": {"d1": 3, "d2": -2}, "1": {"d1": 0}}
    write_qrels(tmp_path / "q.txt", qrels)
    assert (tmp_path / "q.txt").read_text() == "01 0 d1 3\n01 0 d2 -2\n1 0 d1 0\n"
    assert read_qrels(tmp_path / "q.txt") == qrels


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        ({"q 1": {"d": 1.0}}, "query id: expected text without white space, got 'q 1'"),
        ({"q1": {"d\t1": 1.0}}, "doc id: expected text without white space"),
        ({"q1": {"": 1.0}}, "doc id: expected text without white space, got ''"),
        ({"q1": {"d1": 1.0, "d2": float("nan")}}, "run: expected a finite score for query 'q1' and doc 'd2', got nan"),
        ({"q1": {"d1": float("inf")}}, "run: expected a finite score for query 'q1' and doc 'd1', got inf"),
        ({"q1": {"\ud800": 1.0}}, "expected text that UTF-8 can hold"),
        ({"q1": {}}, "expected a run with at least one doc, got none"),
        ({}, "expected a run with at least one doc, got none"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path, run, complaint):
    path = file(tmp_path, "old\n", "run.trec")
    with pytest.raises(DataError, match=re.escape(complaint)):
        write_run(path, {"q0": {"d": 1.0}, **run} if run and any(run.values()) else run)
    assert path.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.trec"]


def test_a_tag_with_a_blank_is_refused(tmp_path):
    with pytest.raises(DataError, match="tag: expected text without white space, got 'my run'"):
        write_run(tmp_path / "r", {"q1": {"d1": 1.0}}, tag="my run")


def test_nothing_appears_before_the_end(tmp_path):
    path = file(tmp_path, "old", "x.json")
    with pytest.raises(KeyboardInterrupt), write_whole(path) as out:
        out.write("half")
        out.flush()
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_no_place_to_write(tmp_path):
    blocker = file(tmp_path, "", "blocker")
    with pytest.raises(DataError, match="expected a place to write to"):
        write_run(blocker / "run.trec", {"q1": {"d1": 1.0}})


def test_reading_a_run_does_not_import_torch():
    modules = "ranker.data.trec, ranker.evaluation.metrics, ranker.evaluation.report"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout == "False\n"
