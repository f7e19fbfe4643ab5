import gzip
import json
import logging
import os
from pathlib import Path

import pytest

from ranker.data.sources.files import Files
from ranker.errors import ConfigError, DataError

SHARED = Path(os.environ.get("RANKER_SHARED_DATA") or Path(__file__).resolve().parents[3] / ".." / "shared" / "data")


@pytest.fixture
def folder(tmp_path):
    """20 docs, 12 queries of which 10 are judged, no split files, no run."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"id": f"d{i}", "text": f"text {i}"}) + "\n" for i in range(20))
    )
    (folder / "queries.tsv").write_text("".join(f"q{i}\tquery {i}\n" for i in range(12)))
    (folder / "qrels.txt").write_text("".join(f"q{i} 0 d{i} 1\n" for i in range(10)))
    return folder


def split_files(folder, **parts):
    (folder / "qrels.txt").unlink()
    for part, numbers in parts.items():
        (folder / f"qrels.{part}.txt").write_text("".join(f"q{i} 0 d{i} 1\n" for i in numbers))


def run_file(folder, name, lines):
    content = "".join(f"{query_id} Q0 {doc_id} 1 {score} tag\n" for query_id, doc_id, score in lines).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def sizes(splits):
    count = lambda part: None if part is None else len(part.queries)  # noqa: E731
    return count(splits.train), count(splits.val), {name: len(part.queries) for name, part in splits.tests.items()}


# splits


def test_without_split_files_a_hash_deals_the_judged_queries(folder, caplog):
    with caplog.at_level(logging.INFO):
        splits = Files(str(folder)).load()
    assert sizes(splits) == (7, 1, {"mine": 2})
    parts = [set(part.queries) for part in (splits.train, splits.val, splits.tests["mine"])]
    assert set().union(*parts) == {f"q{i}" for i in range(10)} and sum(map(len, parts)) == 10
    assert all(part.qrels.keys() == part.queries.keys() for part in (splits.train, splits.val, splits.tests["mine"]))
    assert "10 judged queries are split by a hash of their ids (seed 0): 7 train, 2 test, 1 dev" in caplog.text
    assert "2 of 12 queries have no judgements and are left out" in caplog.text


def test_hash_split_does_not_depend_on_the_order_of_lines(folder):
    first = Files(str(folder)).load().tests["mine"].queries
    for name in ("queries.tsv", "qrels.txt"):
        (folder / name).write_text("".join(reversed((folder / name).read_text().splitlines(keepends=True))))
    assert Files(str(folder)).load().tests["mine"].queries == first
    assert any(Files(str(folder), split_seed=seed).load().tests["mine"].queries != first for seed in (1, 2))


def test_fractions_can_make_it_a_pure_test_set(folder):
    assert sizes(Files(str(folder), val_fraction=0.0, test_fraction=1.0).load()) == (None, None, {"mine": 10})
    assert sizes(Files(str(folder), val_fraction=0.5, test_fraction=0.0).load()) == (5, 5, {})


def test_split_files_win_over_qrels_txt(folder):
    qrels = (folder / "qrels.txt").read_text()
    split_files(folder, train=range(6), dev=(6, 7), test=(8, 9))
    (folder / "qrels.txt").write_text(qrels)
    splits = Files(str(folder)).load()
    assert (list(splits.train.queries), list(splits.val.queries), list(splits.tests["mine"].queries)) == (
        [f"q{i}" for i in range(6)], ["q6", "q7"], ["q8", "q9"]
    )  # fmt: skip
    assert splits.train.docs is splits.tests["mine"].docs
    assert splits.tests["mine"].qrels == {"q8": {"d8": 1}, "q9": {"d9": 1}}


def test_a_missing_dev_file_is_cut_from_train(folder, caplog):
    split_files(folder, train=range(8), test=(8, 9))
    with caplog.at_level(logging.INFO):
        splits = Files(str(folder), val_fraction=0.25).load()
    assert sizes(splits) == (6, 2, {"mine": 2})
    assert "no validation set: 2 of 8 judged queries are moved from training" in caplog.text
    assert sizes(Files(str(folder), val_fraction=0.0).load()) == (8, None, {"mine": 2})


def test_a_missing_train_file_leaves_data_that_only_evaluates(folder):
    split_files(folder, dev=(0, 1), test=range(2, 10))
    assert sizes(Files(str(folder)).load()) == (None, 2, {"mine": 8})


def test_a_query_in_two_split_files_is_refused(folder):
    split_files(folder, train=range(8), dev=(6,), test=(8, 9))
    with pytest.raises(DataError, match=r"val: expected queries that train lacks, got 1 that both have, such as 'q6'"):
        Files(str(folder)).load()


def test_pc22_qrels_of_1_do_not_judge_01(folder):
    (folder / "queries.tsv").write_text("01\ta\n1\tb\n001\tc\n")
    (folder / "qrels.txt").write_text("1 0 d1 1\n")
    test = Files(str(folder), val_fraction=0.0, test_fraction=1.0).load().tests["mine"]
    assert test.queries == {"1": "b"}


def test_gzipped_files_are_the_same_data(folder, tmp_path):
    plain = Files(str(folder)).load()
    packed = tmp_path / "packed" / "mine"
    packed.mkdir(parents=True)
    for path in folder.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    splits = Files(str(packed)).load()
    assert splits.train.docs.fingerprint == plain.train.docs.fingerprint
    assert [splits.train.queries, splits.train.qrels, sizes(splits)] == [
        plain.train.queries,
        plain.train.qrels,
        sizes(plain),
    ]


# candidates


def test_the_only_run_in_the_folder_is_re_ranked(folder):
    run_file(folder, "bm25.run.gz", [(f"q{i}", f"d{(i + j) % 20}", 2.0 - j) for i in range(12) for j in range(3)])
    splits = Files(str(folder)).load()
    assert (
        splits.tests["mine"].candidates["q0"] == ["d0", "d1", "d2"]
        and splits.train.candidates is splits.tests["mine"].candidates
    )
    assert Files(str(folder), candidates="bm25").load().train.candidates is None


def test_of_several_runs_one_must_be_chosen(folder, tmp_path):
    for name, doc_id in (("a.run", "d0"), ("b.run.gz", "d1")):
        run_file(folder, name, [(f"q{i}", doc_id, 1.0) for i in range(10)])
    run_file(tmp_path, "elsewhere.txt", [(f"q{i}", "d2", 1.0) for i in range(10)])
    with pytest.raises(
        DataError, match=r"mine: expected one run, got a.run, b.run.gz; choose with data.candidates=NAME"
    ):
        Files(str(folder)).load()
    chosen = {name: Files(str(folder), candidates=name).load().train.candidates["q0"]
              for name in ("a.run", "b.run.gz", str(tmp_path / "elsewhere.txt"))}  # fmt: skip
    assert list(chosen.values()) == [["d0"], ["d1"], ["d2"]]


@pytest.mark.parametrize("name", ["../elsewhere.txt", "x/../../elsewhere.txt", ".."])
def test_a_relative_run_path_cannot_leave_the_folder(folder, tmp_path, name):
    run_file(tmp_path, "elsewhere.txt", [("q0", "d2", 1.0)])
    with pytest.raises(
        DataError, match=r"data.candidates: expected a file inside .*mine or an absolute path, got '.*\.\..*'"
    ):
        Files(str(folder), candidates=name).load()


def test_a_run_that_does_not_belong_is_refused(folder, caplog):
    run_file(folder, "a.run", [(f"q{i}", "d0" if i else "doc-of-another-collection", 1.0) for i in range(10)])
    with pytest.raises(
        DataError,
        match=r"a.run:1: expected candidates from the collection, got the unknown doc id 'doc-of-another-collection'",
    ):
        Files(str(folder)).load()
    run_file(folder, "a.run", [(f"query-{i}", "d0", 1.0) for i in range(10)])
    with pytest.raises(DataError, match=r"a.run:1: expected candidates for the queries of train"):
        Files(str(folder)).load()
    with pytest.raises(DataError, match=r"data.candidates: expected a run file, got '.*b.run', which is none"):
        Files(str(folder), candidates="b.run").load()
    (folder / "a.run").write_text("")
    with pytest.raises(DataError, match=r"a.run: expected .* got an empty file"):
        Files(str(folder)).load()


# bad input


@pytest.mark.parametrize("name", ["docs.jsonl", "queries.tsv", "qrels.txt"])
def test_a_missing_or_empty_file_is_named(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: expected this file or {name}.gz, got neither"):
        Files(str(folder)).load()
    (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name}: expected .* got an empty file"):
        Files(str(folder)).load()
    (folder / name).write_bytes(content)
    (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=rf"{name}: expected one of {name} and {name}.gz, got both"):
        Files(str(folder)).load()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"data.path: expected a folder with docs.jsonl, queries.tsv and qrels.txt, got '.*nowhere'"
    ):
        Files(str(tmp_path / "nowhere")).load()


def test_judgements_of_a_query_without_text_name_the_line(folder):
    with (folder / "qrels.txt").open("a") as file:
        file.write("\nq77 0 d1 1\n")
    with pytest.raises(
        DataError, match=r"qrels.txt:12: expected judgements of queries in queries.tsv, got 'q77'; add its text there"
    ):
        Files(str(folder)).load()


def test_judged_docs_that_the_collection_lacks_warn_and_still_count(folder, caplog):
    (folder / "qrels.txt").write_text("q0 0 d0 1\nq0 0 gone 1\nq1 0 d1 1\n")
    test = Files(str(folder), val_fraction=0.0, test_fraction=1.0).load().tests["mine"]
    assert test.qrels["q0"] == {"d0": 1, "gone": 1}
    assert "qrels.txt: 1 of 3 judged docs, such as 'gone', are not in the collection" in caplog.text
    (folder / "qrels.txt").write_text("q0 0 gone 1\n")
    with pytest.raises(DataError, match=r"qrels.txt:1: expected judgements of docs in the collection"):
        Files(str(folder)).load()


def test_pc08_contradicting_judgements_are_refused(folder):
    (folder / "qrels.txt").write_text("q1 0 d1 1\nq1 0 d1 0\n")
    with pytest.raises(DataError, match=r"qrels.txt:2: expected one relevance for query 'q1' and doc 'd1'"):
        Files(str(folder)).load()


def test_options_out_of_range():
    with pytest.raises(ConfigError, match=r"data.test_fraction: expected a share between 0 and 1, got 20"):
        Files("x", test_fraction=20)
    with pytest.raises(
        ConfigError, match=r"data.val_fraction: expected at most 0.2 beside data.test_fraction, got 0.5"
    ):
        Files("x", val_fraction=0.5, test_fraction=0.8)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data with real collections is not there")
@pytest.mark.parametrize(
    ("name", "docs", "queries", "judgements"),
    [
        ("adi", 82, 35, 170),
        ("cacm", 3204, 52, 796),
        ("cisi", 1460, 76, 3114),
        ("medline", 1033, 30, 696),
        ("nfcorpus-preprocessed", 3395, 647, 23719),
    ],
)
def test_real_collections_have_the_published_counts(name, docs, queries, judgements):
    splits = Files(str(SHARED / name)).load()
    parts = [part for part in (splits.train, splits.val, *splits.tests.values()) if part is not None]
    assert {len(part.docs) for part in parts} == {docs}
    assert sum(len(part.queries) for part in parts) == queries
    assert sum(len(judged) for part in parts for judged in part.qrels.values()) == judgements
    assert all(part.candidates is not None for part in parts)
