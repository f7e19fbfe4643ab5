import gzip
import json
import logging

import pytest

from ranker.data.collection import Doc, MemoryDocs
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.errors import DataError

DOCS = [
    Doc("10", "ten", "Title"),
    Doc("01", "first\u0085part\u2028two\u000bthree"),
    Doc("1", 'say "hi" \u00e2\u0080\u0099 \U0001f600'),
    Doc("d-\u00e9", ""),
]


def lines_of(docs, ensure_ascii=False):
    return [
        json.dumps(
            {"id": d.doc_id, "text": d.text} | ({"title": d.title} if d.title else {}), ensure_ascii=ensure_ascii
        )
        for d in docs
    ]


@pytest.fixture(params=["plain", "gzip", "gzip under a plain name"])
def write(request, tmp_path):
    def write(content: bytes):
        path = tmp_path / ("docs.jsonl.gz" if request.param == "gzip" else "docs.jsonl")
        path.write_bytes(content if request.param == "plain" else gzip.compress(content))
        return path

    return write


# docs


@pytest.mark.parametrize("form", ["\n", "\r\n", "bom", "no last line feed", "blank lines", "escaped"])
def test_docs_are_the_same_however_they_are_written(write, form):
    lines = lines_of(DOCS, ensure_ascii=form == "escaped")
    text = {
        "\r\n": "\r\n".join(lines) + "\r\n",
        "bom": "\ufeff" + "\n".join(lines) + "\n",
        "no last line feed": "\n".join(lines),
        "blank lines": "\n\n" + "\n \n".join(lines) + "\n\n",
    }.get(form, "\n".join(lines) + "\n")
    docs = JsonlDocs(write(text.encode()))
    assert list(docs) == DOCS and len(docs) == 4
    assert [docs[doc.doc_id] for doc in reversed(DOCS)] == DOCS[::-1]
    assert docs.fingerprint == MemoryDocs(DOCS).fingerprint


def test_pc22_ids_that_look_like_numbers_are_different_strings(write):
    docs = JsonlDocs(write(b'{"id": "1", "text": "a"}\n{"id": "01", "text": "b"}\n{"id": 100, "text": "c"}\n'))
    assert [docs[doc_id].text for doc_id in ("1", "01", "100")] == ["a", "b", "c"]
    assert "001" not in docs and "10" not in docs and "1000" not in docs and 1 not in docs and "" not in docs
    with pytest.raises(KeyError):
        docs["001"]


def test_pc28_a_line_ends_at_line_feed_alone(write):
    docs = JsonlDocs(
        write('{"id": "d1", "text": "first\u2028part\u0085two"}\n{"id": "d2", "text": "second"}\n'.encode())
    )
    assert [doc.text for doc in docs] == ["first\u2028part\u0085two", "second"]


def test_pc29_double_encoded_text_stays_as_it_is(write):
    text = "let\u00e2\u0080\u0099s go"
    assert JsonlDocs(write(json.dumps({"id": "d1", "text": text}, ensure_ascii=False).encode()))["d1"].text == text


def test_null_title_is_no_title_and_other_keys_are_ignored(write):
    assert list(JsonlDocs(write(b'{"text": "t", "url": 3, "id": "a", "title": null}'))) == [Doc("a", "t")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"id": "d3", "text": "x"',
            r"docs.jsonl(.gz)?:3: expected a JSON object, got '\{\"id\": \"d3\", \"text\": \"x\"'",
        ),
        ('["d3", "x"]', r":3: expected a JSON object with \"id\" and \"text\", got"),
        ('{"id": "d3"}', r":3: expected a JSON object with \"id\" and \"text\", got"),
        ('{"text": "x"}', r":3: expected a JSON object with \"id\" and \"text\", got"),
        ('{"id": 1.5, "text": "x"}', r":3: expected a string as \"id\", got '1.5'"),
        ('{"id": true, "text": "x"}', r":3: expected a string as \"id\", got 'true'"),
        ('{"id": null, "text": "x"}', r":3: expected a string as \"id\", got 'null'"),
        ('{"id": "d3", "text": null}', r":3: expected a string as \"text\", got 'null'"),
        ('{"id": "d3", "text": "x", "title": 7}', r":3: expected a string as \"title\", got '7'"),
        ('{"id": "d 3", "text": "x"}', r":3: expected an id without white space, got 'd 3'"),
        ('{"id": "", "text": "x"}', r":3: expected an id without white space, got ''"),
        ('{"id": "d1", "text": "x"}', r":3: expected each doc id once, got 'd1' here and in line 1"),
        ('{"id": "d3", "text": "\\ud800"}', r":3: expected characters in \"text\", got the lone surrogate"),
    ],
)
def test_bad_lines_name_file_and_line(write, line, message):
    with pytest.raises(DataError, match=message) as caught:
        JsonlDocs(write(f'{{"id": "d1", "text": "a"}}\n\n{line}\n'.encode()))
    assert "\n" not in str(caught.value)


def test_not_utf8_names_the_byte(write):
    with pytest.raises(DataError, match=r":2: expected UTF-8, got byte 0xe9"):
        JsonlDocs(write(b'{"id": "d1", "text": "a"}\n{"id": "d2", "text": "caf\xe9"}\n'))


def test_empty_and_missing_files(write, tmp_path):
    for content in (b"", b"\n\n"):
        with pytest.raises(DataError, match=r"docs.jsonl(.gz)?: expected lines like .* got an empty file"):
            JsonlDocs(write(content))
    with pytest.raises(DataError, match=r"nothing.jsonl: expected a readable file, got 'No such file or directory'"):
        JsonlDocs(tmp_path / "nothing.jsonl")


def test_a_cut_gzip_file_is_named(tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines_of(DOCS) * 50).encode())[:-20])
    with pytest.raises(DataError, match=r"docs.jsonl.gz: expected a whole gzip file, got "):
        JsonlDocs(path)
    path.write_bytes(gzip.compress("".join(f"{i}\tquery {i}\n" for i in range(1000)).encode())[:-20])
    with pytest.raises(DataError, match=r"docs.jsonl.gz: expected a whole gzip file, got "):
        read_queries(path)


def test_fingerprint_changes_with_any_id_text_title_or_order(tmp_path):
    def fingerprint(docs):
        path = tmp_path / "docs.jsonl"
        path.write_text("\n".join(lines_of(docs)))
        return JsonlDocs(path).fingerprint

    first, second = Doc("a", "x"), Doc("b", "y")
    variants = [
        [first, second],
        [second, first],
        [Doc("c", "x"), second],
        [Doc("a", "z"), second],
        [Doc("a", "x", "t"), second],
        [Doc("a", "", "x"), second],
        [first],
    ]
    assert len({fingerprint(docs) for docs in variants}) == len(variants)


def test_docs_take_little_memory_beside_the_mapped_file(tmp_path):
    import tracemalloc

    path = tmp_path / "docs.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": "{i}", "text": "{"x" * 300}"}}\n' for i in range(20_000))
    tracemalloc.start()
    docs = JsonlDocs(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert docs["19999"].text == "x" * 300
    assert held < 20_000 * 60, "expected 20 bytes and the id per doc, got the texts in memory"


# queries


def queries_of(tmp_path, content):
    path = tmp_path / "queries.tsv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_queries(path)


def test_pc25_unbalanced_quotes_are_text(tmp_path):
    got = queries_of(tmp_path, '1\t"hello world\n2\tplain text\n3\tsay "hi"\n4\tend"\n5\t"quoted"\n6\ta ""b""\n')
    assert got == {
        "1": '"hello world',
        "2": "plain text",
        "3": 'say "hi"',
        "4": 'end"',
        "5": '"quoted"',
        "6": 'a ""b""',
    }


def test_pc26_null_na_nan_none_are_texts(tmp_path):
    assert queries_of(tmp_path, "7\tnull\n8\tNA\n9\tnan\n10\tnone\n") == {
        "7": "null",
        "8": "NA",
        "9": "nan",
        "10": "none",
    }


def test_pc22_query_ids_stay_strings(tmp_path):
    assert queries_of(tmp_path, "01\ta\n1\tb\n001\tc\n") == {"01": "a", "1": "b", "001": "c"}


def test_pc28_only_line_feed_ends_a_query(tmp_path):
    assert queries_of(tmp_path, "d1\tfirst\u0085part\u2028two\u000bthree\nd2\tsecond\n") == {
        "d1": "first\u0085part\u2028two\u000bthree", "d2": "second"
    }  # fmt: skip


def test_bom_crlf_tabs_and_spaces(tmp_path):
    assert queries_of(tmp_path, "\ufeffq1\tone\r\n\r\nq2\t two\tand more \r\n") == {
        "q1": "one",
        "q2": " two\tand more ",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1\ta\nq2 b\n", r"queries.tsv:2: expected a query id, a tab and the query text, got 'q2 b'"),
        ("q1\ta\nq2\t \n", r"queries.tsv:2: expected a text for query 'q2', got ' '"),
        ("q1\ta\n\nq1\tb\n", r"queries.tsv:3: expected each query id once, got 'q1' again"),
        ("q1\ta\n\tb\n", r"queries.tsv:2: expected an id without white space, got ''"),
        ("q 1\ta\n", r"queries.tsv:1: expected an id without white space, got 'q 1'"),
        ("", r"queries.tsv: expected lines of query id, tab and text, got an empty file"),
        (b"q1\ta\nq2\t\xff\n", r"queries.tsv:2: expected UTF-8, got byte 0xff"),
    ],
)
def test_bad_queries_name_file_and_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as caught:
        queries_of(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_big_packed_files_are_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ranker.data.corpus_files._BIG_BYTES", 10)
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines_of(DOCS)).encode()))
    with caplog.at_level(logging.WARNING):
        JsonlDocs(path)
    assert "gunzip it to have it mapped" in caplog.text
