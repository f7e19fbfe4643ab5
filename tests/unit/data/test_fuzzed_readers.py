"""Thousands of damaged files per reader: each is read as by a simple parser below, or refused by a one-line error."""

import gzip
import json
import random
import re
import resource
from contextlib import suppress

import numpy as np
import pytest

from ranker.data.corpus_files import JsonlDocs, read_lines, read_queries
from ranker.data.parsing import MAX_GRADE, MAX_ID_BYTES
from ranker.data.sources.files import Files
from ranker.data.trec import read_candidates, read_qrels, read_run
from ranker.errors import DataError
from ranker.probing.examples import PairSample, read_examples
from ranker.probing.tasks.fact import FactChecking
from ranker.probing.tasks.gap import FILES, Gap
from ranker.probing.tasks.jsonl import JsonLines
from ranker.probing.word_vectors import read_vectors

FILES_EACH = 1200
SAMPLE = PairSample(None, (), 100, 1, 1, 0, {})
NASTY = [
    b"",
    b" ",
    b"\t",
    b"\t\t",
    b"\n",
    b"\r\n",
    b"\r",
    b"\0",
    b"\xa0",
    "\u00a0".encode(),
    "\u2028".encode(),
    "\u0085".encode(),
    b"\x1c",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xff",
    b"\x1f\x8b",
    b'"',
    b"'",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"true",
    b"NaN",
    b"nan",
    b"-inf",
    b"1e39",
    b"-1e39",
    b"1e999",
    b"1_0",
    b"2147483648",
    b"-" + b"9" * 21,
    b"9" * 5000,
    b"0x10",
    b"1.5",
    b"+2",
    b"--5",
    "\u0661".encode(),
    "\u00b2".encode(),
    b"x" * 2000,
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"Q0",
    b"q1",
    b"d1",
]


class Refused(Exception):
    """The plain parse refuses it too."""


# damage
# ----------------------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to three random changes."""
    for _ in range(rng.randint(1, 3)):
        content = _change(content, rng)
    if rng.random() < 0.1:
        content = gzip.compress(content, 1)
        if rng.random() < 0.5:
            content = content[: rng.randrange(len(content))] if rng.random() < 0.5 else _change(content, rng)
    return content


def _change(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    place, line = rng.randrange(len(content) + 1), rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:  # put something in
        return content[:place] + rng.choice(NASTY) + content[place:]
    if kind == 1:  # in place of a word
        words = list(re.finditer(rb"[^\s\":,{}\[\]]+", content))
        if not words:
            return content
        word = rng.choice(words)
        return content[: word.start()] + rng.choice(NASTY) + content[word.end() :]
    if kind == 2:
        return content[:place] + content[place + rng.randint(1, 12) :]
    if kind == 3:
        return content[:place]
    if kind == 4 and content:
        place = min(place, len(content) - 1)
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    if kind == 5:
        lines.insert(rng.randrange(len(lines) + 1), lines[line])
        return b"\n".join(lines)
    if kind == 6:
        lines.pop(line)
        return b"\n".join(lines)
    return rng.choice(
        [
            content.replace(b"\n", b"\r\n"),
            b"\xef\xbb\xbf" + content,
            content.decode(errors="replace").encode("utf-16"),
            b"",
        ]
    )


# plain parses
# ----------------------------------------------------------------------------------------------------------------------


def numbered_lines(content: bytes) -> list[bytes]:
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except Exception as error:
            raise Refused from error
    return [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]


def text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Refused from error


def id_of(raw: bytes) -> str:
    word = text_of(raw)
    if len(raw) > MAX_ID_BYTES or b"\0" in raw or not re.fullmatch(r"[^ \t\n\v\f\r]+", word):
        raise Refused
    return word


def plain_qrels(content: bytes) -> dict:
    qrels: dict = {}
    for line in numbered_lines(content):
        columns = line.split()
        if (
            len(columns) != 4
            or not re.fullmatch(rb"[+-]?[0-9]{1,4300}", columns[3])
            or abs(int(columns[3])) > MAX_GRADE
        ):
            raise Refused
        if qrels.setdefault(id_of(columns[0]), {}).setdefault(id_of(columns[2]), int(columns[3])) != int(columns[3]):
            raise Refused
    if not qrels:
        raise Refused
    return qrels


def run_rows(content: bytes, largest: float) -> list[tuple[str, str, float]]:
    rows = []
    for line in numbered_lines(content):
        columns = line.split()
        if len(columns) != 6 or not re.fullmatch(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", columns[4]):
            raise Refused
        if not abs(float(columns[4])) <= largest:
            raise Refused
        rows.append((id_of(columns[0]), id_of(columns[2]), float(columns[4])))
    if not rows:
        raise Refused
    return rows


def plain_run(content: bytes) -> dict:
    run: dict = {}
    for query_id, doc_id, score in run_rows(content, 1.7976931348623157e308):
        if doc_id in run.setdefault(query_id, {}):
            raise Refused
        run[query_id][doc_id] = score
    return run


def plain_candidates(content: bytes) -> dict:
    best: dict = {}
    for query_id, doc_id, score in run_rows(content, 3.4028235677973362e38):
        docs = best.setdefault(query_id, {})
        docs[doc_id] = max(score, docs.get(doc_id, score))
    return {
        query_id: sorted(docs, key=lambda doc_id: (docs[doc_id], doc_id.encode()), reverse=True)
        for query_id, docs in best.items()
    }


def plain_queries(content: bytes) -> dict:
    queries: dict = {}
    for line in numbered_lines(content):
        query_id, tab, text = line.removesuffix(b"\r").partition(b"\t")
        if not tab or not text_of(text).strip() or text_of(query_id) in queries:
            raise Refused
        queries[id_of(query_id)] = text_of(text)
    if not queries:
        raise Refused
    return queries


def plain_docs(content: bytes) -> dict:
    docs: dict = {}
    for line in numbered_lines(content):
        try:
            record = json.loads(text_of(line))
            doc_id, text, title = record["id"], record["text"], record.get("title")
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise Refused from error
        doc_id = str(doc_id) if type(doc_id) is int else doc_id
        if not (isinstance(doc_id, str) and isinstance(text, str) and isinstance(title, str | None)):
            raise Refused
        if any("\ud800" <= character <= "\udfff" for character in doc_id + text + (title or "")) or doc_id in docs:
            raise Refused
        docs[id_of(doc_id.encode())] = (text, title or "")
    if not docs:
        raise Refused
    return docs


# what is damaged
# --------------------------------------------------------------------------------------------------------------------

QRELS = b"".join(b"q%d 0 d%d %d\n" % (i, j, (i + j) % 3) for i in range(4) for j in range(3))
RUN = b"".join(b"q%d Q0 d%d %d %.3f tag\n" % (i, j, j + 1, 9.5 - j) for i in range(4) for j in range(3))
QUERIES = b"".join(b"q%d\twhat is number%d\n" % (i, i) for i in range(4))
DOCS = b"".join(b'{"id": "d%d", "text": "the text of %d", "title": "Title \\u00e9"}\n' % (i, i) for i in range(4))
RECORD = {
    "info": {"qid": "q1", "pid": "d1", "part": "train"},
    "input": {"query": "one two", "passage": "three four"},
    "targets": [
        {"span1": {"side": "doc", "start": 0, "end": 5}, "span2": {"side": "query"}, "label": "A"},
        {"span1": {"side": "doc"}, "value": 2.5},
    ],
}
RECORDS = b"".join(json.dumps(RECORD | {"targets": [target]}).encode() + b"\n" for target in RECORD["targets"])
GAP = (
    b"ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
    b"dev-1\tAnn met Eve and she smiled.\tshe\t16\tAnn\t0\tTRUE\tEve\t8\tFALSE\tu\n"
)
LABELS = b"query_id\tdoc_id\tlabel\tsplit\nq1\td1\tSUPPORTS\ttrain\nq2\td2\tREFUTES\ttest\n"
BEIR = (
    b'{"_id": "q1", "text": "a claim", "metadata": {"d1": [{"label": "SUPPORT"}]}}\n'
    b'{"_id": 2, "text": "b", "metadata": {"label": "CONTRADICT"}}\n'
)
VECTORS = b"the 0.5 1.5 -2\nword 1e-3 2 3\n. . . 1 2 3\n"


def without_bom_or_gzip(read):
    return lambda path: read(path)


EXACT = {
    "qrels": (QRELS, read_qrels, plain_qrels),
    "run": (RUN, read_run, plain_run),
    "candidates": (RUN, lambda path: dict(read_candidates(path)), plain_candidates),
    "queries": (QUERIES, read_queries, plain_queries),
    "docs": (DOCS, lambda path: {doc.doc_id: (doc.text, doc.title) for doc in JsonlDocs(path)}, plain_docs),
}
# folder of a reader: its files, which one is damaged, and how they are read
WHOLE = {
    "examples": ({"a.jsonl": RECORDS}, lambda folder: list(read_examples(folder / "a.jsonl"))),
    "jsonl": (
        {"a.jsonl": RECORDS},
        lambda folder: [(task := JsonLines(str(folder / "a.jsonl"))).classes, list(task.examples(SAMPLE))],
    ),
    "gap": (dict.fromkeys(FILES.values(), GAP), lambda folder: list(Gap(str(folder)).examples(SAMPLE))),
    "labels": (
        {"labels.tsv": LABELS, "docs.jsonl": DOCS, "queries.tsv": QUERIES},
        lambda folder: list(FactChecking(str(folder)).examples(SAMPLE)),
    ),
    "beir": (
        {
            "queries.jsonl": BEIR,
            "corpus.jsonl": DOCS.replace(b'"id"', b'"_id"'),
            "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\td1\t1\n2\td2\t1\n",
        },
        lambda folder: list(FactChecking(str(folder)).examples(SAMPLE)),
    ),
    "vectors": ({"v.txt": VECTORS}, lambda folder: read_vectors(folder / "v.txt", {"the", "word"}).vectors),
    "files": (
        {"docs.jsonl": DOCS, "queries.tsv": QUERIES, "qrels.txt": QRELS, "a.run": RUN},
        lambda folder: Files(str(folder), val_fraction=0.3, test_fraction=0.3).load(),
    ),
}


@pytest.fixture(autouse=True)
def bounded_memory():
    """No file of these sizes needs 300 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def check_message(message: str, folder) -> None:
    assert message.startswith(str(folder)) and "\n" not in message and len(message) < 600, message
    where = re.match(r"[^:]+(:\d+)?: expected ", message)
    assert where, message
    of_a_whole_file = (
        "empty file|whole gzip|UTF-16|remove one$|got none|labelled pairs|got neither|as in the first line"
    )
    assert where.group(1) or re.search(of_a_whole_file, message), message


@pytest.mark.parametrize("name", list(EXACT))
def test_a_damaged_file_is_read_as_a_plain_parse_reads_it_or_refused_by_line(name, tmp_path):
    content, read, plain = EXACT[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    assert read(path) == plain(content)
    rng = random.Random(name)
    accepted = 0
    for _ in range(FILES_EACH):
        changed = damaged(content, rng)
        path.write_bytes(changed)
        expected = None
        with suppress(Refused):
            expected = plain(changed)
        try:
            found = read(path)
        except DataError as error:
            check_message(str(error), path)
            assert expected is None, (changed[:500], str(error))
        else:
            assert found == expected, changed[:500]
            accepted += 1
    assert FILES_EACH * 0.05 < accepted < FILES_EACH * 0.8


@pytest.mark.parametrize("name", list(WHOLE))
def test_a_damaged_file_among_others_is_read_or_refused_by_line(name, tmp_path):
    files, read = WHOLE[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    read(tmp_path)
    rng = random.Random(name)
    refused = 0
    for _ in range(FILES_EACH // 2):
        file = rng.choice(list(files))
        (tmp_path / file).write_bytes(damaged(files[file], rng))
        try:
            read(tmp_path)
        except DataError as error:
            refused += 1
            check_message(str(error), tmp_path)
        (tmp_path / file).write_bytes(files[file])
    assert refused > FILES_EACH * 0.05


def test_vectors_are_finite_and_lines_are_those_of_the_file(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "file"
    for _ in range(FILES_EACH // 4):
        path.write_bytes(changed := damaged(VECTORS, rng))
        with suppress(DataError):
            assert np.isfinite(read_vectors(path, {"the", "word"}).vectors).all()
        with suppress(DataError, Refused):
            assert [line for _, line in read_lines(path)] == [
                text_of(line.removesuffix(b"\r")) for line in numbered_lines(changed)
            ]
