import io
import os

import numpy as np
import pytest

from ranker.data.collection import MemoryDocs, known_docs
from ranker.data.separated import SortedIds, field_bounds, fields, whole_lines
from ranker.data.tsv_docs import TsvDocs
from ranker.errors import DataError

TEXTS = {
    "7": "one two",
    "10": "",
    "é1": "café – naïve 1 % \u2028 \u0085",
    "1": 'quotes " and \\ stay',
    "zz9": "x" * 5000,
}


def write(path, texts, end="\n"):
    path.write_bytes("\n".join(f"{doc_id}\t{text}" for doc_id, text in texts).encode() + end.encode())
    return path


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_blocks_are_whole_lines_and_lose_nothing(size):
    content = b"1\ta\n22\tbb\n\n333\tccc\n4\t"
    blocks = list(whole_lines(io.BytesIO(content), size))
    assert b"".join(blocks) == content + b"\n" and all(block.endswith(b"\n") for block in blocks)


def test_fields_equal_those_of_split_lines():
    rng = np.random.default_rng(0)
    lines = [[f"{n:x}" * int(rng.integers(0, 4)) for n in rng.integers(0, 1000, 3)] for _ in range(200)]
    block = np.frombuffer("".join("\t".join(line) + "\n" for line in lines).encode(), np.uint8)
    starts, ends = field_bounds(block, 3)
    for column in range(3):
        got = fields(block, starts[:, column], ends[:, column])
        assert [word.decode() for word in got] == [line[column] for line in lines]


@pytest.mark.parametrize("content", [b"a\tb\tc\n", b"a\n", b"\n", b"a\tb\n\nc\td\n", b"a\tb\r\n", b"a\nb\tc\td\n"])
def test_lines_of_another_form_are_seen(content):
    assert field_bounds(np.frombuffer(content, np.uint8), 2) is None


@pytest.mark.parametrize("end", ["\n", ""])
def test_docs_of_a_file_are_those_in_memory(tmp_path, end):
    docs = TsvDocs(write(tmp_path / "c.tsv", TEXTS.items(), end))
    expected = MemoryDocs(docs)
    assert [(doc.doc_id, doc.text) for doc in docs] == list(TEXTS.items()) and len(docs) == 5
    assert docs.fingerprint == expected.fingerprint
    assert all(docs[doc_id].text == text for doc_id, text in TEXTS.items())
    wanted = ["10", "1", "100", "", "é1", "zz99", "zz9"]
    ids = np.array([word.encode() for word in wanted])
    assert known_docs(docs, ids).tolist() == known_docs(expected, ids).tolist() == [word in TEXTS for word in wanted]
    assert [word in docs for word in wanted] == [word in TEXTS for word in wanted] and 10 not in docs
    with pytest.raises(KeyError):
        docs["100"]


def test_docs_in_many_reads_and_in_a_fork(tmp_path, monkeypatch):
    monkeypatch.setattr("ranker.data.tsv_docs._READ", 64)
    texts = [(str(i), "w" * (i % 90)) for i in range(500)]
    docs = TsvDocs(write(tmp_path / "c.tsv", texts))
    assert [(doc.doc_id, doc.text) for doc in docs] == texts
    reading = iter(docs)
    next(reading)
    child = os.fork()
    if not child:
        os._exit(0 if [(doc.doc_id, doc.text) for doc in docs] == texts else 1)
    assert [doc.doc_id for doc in reading] == [doc_id for doc_id, _ in texts[1:]]
    assert os.waitpid(child, 0)[1] == 0


def test_the_stored_fingerprint_is_of_this_content(tmp_path):
    path = write(tmp_path / "c.tsv", TEXTS.items())
    first = TsvDocs(path).fingerprint
    stored = tmp_path / "c.tsv.ranker_fingerprint.json"
    assert first in stored.read_text()
    changed = TsvDocs(write(path, [*TEXTS.items(), ("new", "doc")])).fingerprint
    assert changed != first and changed in stored.read_text()
    stored.write_text(stored.read_text().replace(changed[:4], "zzzz"))  # damaged
    assert TsvDocs(path).fingerprint == changed


def test_faults_name_the_line(tmp_path):
    with pytest.raises(DataError, match=r"c.tsv:3: expected each doc id once, got that of line 1 again"):
        TsvDocs(write(tmp_path / "c.tsv", [("1", "a"), ("2", "b"), ("1", "c")]))
    with pytest.raises(DataError, match=r"expected lines of id, tab and text"):
        TsvDocs(write(tmp_path / "c.tsv", [("1", "a\tb")]))
    (tmp_path / "c.tsv").write_bytes(b"1\t\xff\n")
    with pytest.raises(DataError, match=r"c.tsv: expected UTF-8, got byte 0xff"):
        TsvDocs(tmp_path / "c.tsv")


def test_sorted_ids_find_one_or_many():
    ids = np.array([b"b", b"abc", b"a", b"zz"])
    found = SortedIds(ids)
    assert [found.row(word) for word in ("b", "abc", "a", "zz", "ab", "abcd", "", 3)] == [0, 1, 2, 3, -1, -1, -1, -1]
    assert found.repeat is None and SortedIds(np.array([b"x", b"y", b"x"])).repeat == (0, 2)
    assert not SortedIds(np.empty(0, "S1")).known(np.array([b"a"])).any()
