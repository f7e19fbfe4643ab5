"""Folders in the `files` layout that are broken in one way each: one line that names the file (and its line), before anything is trained."""

import gzip
import json
import os
from pathlib import Path

import pytest

from ranker.assembly.data import load_splits
from ranker.data.sources.files import Files
from ranker.errors import ConfigError, DataError

DOCS = [json.dumps({"id": f"d{i}", "text": f"words of doc number{i}"}) for i in range(12)]
QUERIES = [f"q{i}\tnumber{i}" for i in range(12)]
QRELS = [f"q{i} 0 d{i} 1" for i in range(12)]


@pytest.fixture
def folder(tmp_path):
    """A whole folder."""
    (tmp_path / "docs.jsonl").write_text("\n".join(DOCS) + "\n")
    (tmp_path / "queries.tsv").write_text("\n".join(QUERIES) + "\n")
    (tmp_path / "qrels.txt").write_text("\n".join(QRELS) + "\n")
    return tmp_path


def text(name: str, content: str | bytes):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(name: str, line: int, content: str | bytes):
    """Another line in the place of one, counted from 1."""

    def change(folder: Path) -> None:
        lines = (folder / name).read_bytes().split(b"\n")
        lines[line - 1] = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(b"\n".join(lines))

    return change


def gone(name: str):
    return lambda folder: (folder / name).unlink()


def folder_instead(name: str):
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).mkdir())


def link(name: str):
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to("nowhere"))


def pipe(name: str):
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def recoded(name: str, encoding: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_text().encode(encoding))


def rewritten(name: str, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def cut_gzip(name: str):
    return lambda folder: (folder / name).write_bytes(gzip.compress((folder / name).read_bytes())[:-20])


BROKEN = {
    "no docs": (gone("docs.jsonl"), "docs.jsonl: expected this file or docs.jsonl.gz, got neither"),
    "no queries": (gone("queries.tsv"), "queries.tsv: expected this file or queries.tsv.gz, got neither"),
    "no qrels": (gone("qrels.txt"), "qrels.txt: expected this file or qrels.txt.gz, got neither"),
    "empty docs": (text("docs.jsonl", ""), "docs.jsonl: expected lines like"),
    "empty queries": (
        text("queries.tsv", ""),
        "queries.tsv: expected lines of query id, tab and text, got an empty file",
    ),
    "empty qrels": (text("qrels.txt", "\n\n"), "qrels.txt: expected lines of 4 columns"),
    "empty run": (text("a.run", ""), "a.run: expected lines of 6 columns"),
    "docs both ways": (
        text("docs.jsonl.gz", "x"),
        "docs.jsonl: expected one of docs.jsonl and docs.jsonl.gz, got both",
    ),
    "two runs": (
        lambda folder: [text(name, "")(folder) for name in ("a.run", "b.run")],
        ": expected one run, got a.run, b.run",
    ),
    "a doc twice": (
        changed("docs.jsonl", 5, DOCS[0]),
        "docs.jsonl:5: expected each doc id once, got 'd0' here and in line 1",
    ),
    "a query twice": (
        changed("queries.tsv", 5, QUERIES[0]),
        "queries.tsv:5: expected each query id once, got 'q0' again",
    ),
    "two grades": (
        changed("qrels.txt", 5, "q0 0 d0 2"),
        "qrels.txt:5: expected one relevance for query 'q0' and doc 'd0', got 2 after 1",
    ),
    "a query judged only": (
        changed("qrels.txt", 5, "q99 0 d0 1"),
        "qrels.txt:5: expected judgements of queries in queries.tsv, got 'q99'",
    ),
    "a no-break space in a judged query": (
        changed("qrels.txt", 5, "q\u00a09 0 d0 1"),
        "qrels.txt:5: expected judgements of queries in",
    ),
    "only unknown docs judged": (
        text("qrels.txt", "q1 0 x1 1\nq2 0 x2 1\n"),
        "qrels.txt:1: expected judgements of docs in the collection",
    ),
    "a candidate that is no doc": (
        text("a.run", "q0 Q0 d0 1 2 t\nq0 Q0 d99 1 2 t\n"),
        "a.run:2: expected candidates from the collection",
    ),
    "a run of other queries": (text("a.run", "x Q0 d0 1 2 t\n"), "a.run:1: expected candidates for the queries of"),
    "a score beyond float32": (
        text("a.run", "q0 Q0 d0 1 2 t\nq0 Q0 d1 2 1e39 t\n"),
        "a.run:2: expected a score within single precision",
    ),
    "a score nan": (text("a.run", "q0 Q0 d0 1 nan t\n"), "a.run:1: expected a finite number as score, got 'nan'"),
    "a grade of 2**31": (
        changed("qrels.txt", 3, "q2 0 d2 2147483648"),
        "qrels.txt:3: expected a relevance from -10000 to 10000, got 2147483648",
    ),
    "a grade of -10**20": (
        changed("qrels.txt", 3, "q2 0 d2 -" + "9" * 20),
        "qrels.txt:3: expected a relevance from -10000 to 10000",
    ),
    "brackets": (
        changed("docs.jsonl", 3, "[" * 100_000),
        "docs.jsonl:3: expected a JSON object, got brackets nested too deep",
    ),
    "an id of 5 MB": (
        changed("docs.jsonl", 3, json.dumps({"id": "x" * 5_000_000, "text": "t"})),
        "docs.jsonl:3: expected an id of at most 1024 bytes, got 5000000",
    ),
    "a query id of 5 MB": (
        changed("queries.tsv", 3, "x" * 5_000_000 + "\tt"),
        "queries.tsv:3: expected an id of at most 1024 bytes",
    ),
    "a judged id of 5 MB": (
        changed("qrels.txt", 3, "q2 0 " + "x" * 5_000_000 + " 1"),
        "qrels.txt:3: expected an id of at most 1024 bytes",
    ),
    "a candidate of 5 MB": (
        text("a.run", "q0 Q0 " + "x" * 5_000_000 + " 1 2 t\n"),
        "a.run:1: expected an id of at most 1024 bytes",
    ),
    "a NUL in an id": (changed("queries.tsv", 3, "q\0 2\tt"), "queries.tsv:3: expected an id without white space"),
    "UTF-16 docs": (recoded("docs.jsonl", "utf-16"), "docs.jsonl:1: expected UTF-8, got byte 0xff"),
    "UTF-16 queries": (recoded("queries.tsv", "utf-16"), "queries.tsv:1: expected UTF-8, got byte 0xff"),
    "UTF-16 queries without a mark": (
        recoded("queries.tsv", "utf-16-le"),
        "queries.tsv:1: expected an id without NUL characters",
    ),
    "UTF-16 qrels": (recoded("qrels.txt", "utf-16"), "qrels.txt: expected UTF-8 text, got UTF-16"),
    "Latin-1": (changed("queries.tsv", 3, b"q2\tcaf\xe9"), "queries.tsv:3: expected UTF-8, got byte 0xe9"),
    "carriage returns alone": (
        lambda folder: text("qrels.txt", "\r".join(QRELS))(folder),
        "qrels.txt:1: expected 4 columns",
    ),
    "commas": (changed("qrels.txt", 3, "q2,0,d2,1"), "qrels.txt:3: expected 4 columns"),
    "no tab": (changed("queries.tsv", 3, "q2 number2"), "queries.tsv:3: expected a query id, a tab and the query text"),
    "no text": (changed("queries.tsv", 3, "q2\t "), "queries.tsv:3: expected a text for query 'q2'"),
    "a doc without text": (
        changed("docs.jsonl", 3, '{"id": "d2"}'),
        'docs.jsonl:3: expected a JSON object with "id" and "text"',
    ),
    "a text that is a number": (
        changed("docs.jsonl", 3, '{"id": "d2", "text": 7}'),
        'docs.jsonl:3: expected a string as "text", got',
    ),
    "a JSON list of docs": (
        text("docs.jsonl", f"[{', '.join(DOCS)}]"),
        'docs.jsonl:1: expected a JSON object with "id" and "text"',
    ),
    "docs that are a folder": (folder_instead("docs.jsonl"), "docs.jsonl: expected a file, got a folder"),
    "queries that are a folder": (folder_instead("queries.tsv"), "queries.tsv: expected a file, got a folder"),
    "qrels that are a folder": (folder_instead("qrels.txt"), "qrels.txt: expected a file, got a folder"),
    "a run that is a folder": (folder_instead("a.run"), "a.run: expected a file, got a folder"),
    "docs that are a pipe": (pipe("docs.jsonl"), "docs.jsonl: expected a file, got a pipe or device"),
    "queries that are a pipe": (pipe("queries.tsv"), "queries.tsv: expected a file, got a pipe or device"),
    "qrels that are a pipe": (pipe("qrels.txt"), "qrels.txt: expected a file, got a pipe or device"),
    "docs that lead nowhere": (link("docs.jsonl"), "docs.jsonl: expected a file, got a link to 'nowhere'"),
    "train qrels that lead nowhere": (
        link("qrels.train.txt"),
        "qrels.train.txt: expected a file, got a link to 'nowhere'",
    ),
    "a run that leads nowhere": (link("a.run"), "a.run: expected a file"),
    "docs of half a gzip": (cut_gzip("docs.jsonl"), "docs.jsonl: expected a whole gzip file"),
    "queries of half a gzip": (cut_gzip("queries.tsv"), "queries.tsv: expected a whole gzip file"),
    "qrels of half a gzip": (cut_gzip("qrels.txt"), "qrels.txt: expected a whole gzip file"),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_folder_is_one_line_with_file_and_line(folder, fault):
    break_it, message = BROKEN[fault]
    break_it(folder)
    with pytest.raises(DataError) as caught:
        Files(str(folder)).load()
    assert str(caught.value).startswith(f"{folder}/{message}" if not message.startswith(":") else f"{folder}{message}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


FINE = {
    "a byte order mark": [
        recoded("docs.jsonl", "utf-8-sig"),
        recoded("queries.tsv", "utf-8-sig"),
        recoded("qrels.txt", "utf-8-sig"),
    ],
    "CRLF": [
        rewritten(name, lambda content: content.replace(b"\n", b"\r\n"))
        for name in ("docs.jsonl", "queries.tsv", "qrels.txt")
    ],
    "no last line feed": [rewritten(name, bytes.rstrip) for name in ("docs.jsonl", "queries.tsv", "qrels.txt")],
    "gzip under a plain name": [
        lambda folder: text("docs.jsonl", gzip.compress((folder / "docs.jsonl").read_bytes()))(folder)
    ],
    "plain text under a gzip's name": [lambda folder: (folder / "queries.tsv").rename(folder / "queries.tsv.gz")],
    "a query that nobody judged": [lambda folder: changed("queries.tsv", 13, "q99\tunjudged\n")(folder)],
}


@pytest.mark.parametrize("what", list(FINE))
def test_what_looks_broken_and_is_not_gives_the_same_collection(folder, what):
    before = Files(str(folder)).load()
    docs = [(doc.doc_id, doc.text) for doc in before.train.docs]  # now: the file is mapped, and changes
    for change in FINE[what]:
        change(folder)
    after = Files(str(folder)).load()
    for part in ("train", "val"):
        assert (
            getattr(after, part).queries == getattr(before, part).queries
            and getattr(after, part).qrels == getattr(before, part).qrels
        )
    assert [(doc.doc_id, doc.text) for doc in after.train.docs] == docs


@pytest.mark.parametrize("fractions", [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5)])
def test_all_queries_outside_of_training_are_refused_before_candidates_are_made(folder, tmp_path, fractions):
    from omegaconf import OmegaConf

    node = {
        "_target_": "ranker.data.sources.files.Files",
        "path": str(folder),
        "val_fraction": fractions[0],
        "test_fraction": fractions[1],
    }
    cfg = OmegaConf.create(
        {"data": node, "depth": 10, "batch": {"depth": 10}, "cache_dir": str(tmp_path / "cache"), "val_depth": None}
    )
    with pytest.raises(ConfigError, match="data: expected a training set, got a source without one"):
        load_splits(cfg)
    assert not (tmp_path / "cache").exists()


def test_ids_with_a_no_break_space_are_legal_in_every_file(folder, tmp_path):
    import ir_measures

    from ranker.data.trec import read_qrels, read_run, write_qrels, write_run
    from ranker.evaluation.report import write_evaluation

    odd, query = "d\u00a01", "q\u20281"
    changed("docs.jsonl", 2, json.dumps({"id": odd, "text": "number1"}))(folder)
    changed("queries.tsv", 2, f"{query}\tnumber1")(folder)
    changed("qrels.txt", 2, f"{query} 0 {odd} 1")(folder)
    text("a.run", f"{query} Q0 {odd} 1 2.0 t\n" + "".join(f"q{i} Q0 d{i} 1 1.0 t\n" for i in range(12) if i != 1))(
        folder
    )
    loaded = Files(str(folder), val_fraction=0, test_fraction=1).load().tests[folder.name]
    assert (
        loaded.queries[query] == "number1" and loaded.candidates[query] == [odd] and loaded.docs[odd].text == "number1"
    )
    assert loaded.qrels[query] == {odd: 1}
    run = loaded.candidates.to_run()
    write_run(tmp_path / "out.trec", run)
    write_qrels(tmp_path / "out.qrels", loaded.qrels)
    assert read_run(tmp_path / "out.trec") == run and read_qrels(tmp_path / "out.qrels") == loaded.qrels
    means = write_evaluation(tmp_path / "evaluated", run, loaded.qrels, ["RR@10", "nDCG@10"])["measures"]
    assert means == {"RR@10": 1.0, "nDCG@10": 1.0}
    outside = ir_measures.pytrec_eval.calc_aggregate([ir_measures.RR, ir_measures.nDCG @ 10], loaded.qrels, run)
    assert set(outside.values()) == {1.0}
