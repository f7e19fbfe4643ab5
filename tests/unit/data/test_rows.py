"""`data=rows`: every shape in every format gives the same judgements and scores; each mistake is one line."""

import csv
import gzip
import json

import numpy as np
import pytest

from ranker.data.row_files import CHUNK
from ranker.data.row_groups import RowGroups
from ranker.data.row_shapes import recognise
from ranker.data.sampling import GroupOptions
from ranker.data.sources.rows import Rows
from ranker.data.text_keys import KeyNumbers, key_of
from ranker.data.text_table import TextTable, TextWriter
from ranker.data.token_store import build_token_store
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

# Shape -> rows, and what they mean: query -> doc -> (grade, score). "red" comes in two rows; "an apple" is its positive
# in one row and a negative in another.
SHAPES = {
    "contrast": (
        [
            {"query": "red", "positive": "an apple", "negative_1": "a sky", "negative_2": "grass, \"green\""},
            {"query": "blue", "positive": "a sky", "negative_1": "an apple", "negative_2": "grass, \"green\""},
            {"query": "red", "positive": "blood", "negative_1": "an apple", "negative_2": "a sky"},
        ],
        {
            "red": {"an apple": (1, None), "blood": (1, None), "a sky": (0, None), "grass, \"green\"": (0, None)},
            "blue": {"a sky": (1, None), "an apple": (0, None), "grass, \"green\"": (0, None)},
        },
    ),
    "list": (
        [
            {"query": "red", "docs": ["an apple", "a sky"], "scores": [7.5, -2.25]},
            {"query": "blue", "docs": ["ein Löwe", "an apple", "a sky"], "scores": [0.5, 0.125, 3.0]},
            {"query": "red", "docs": ["blood"], "scores": [8.0]},
        ],
        {
            "red": {"blood": (1, 8.0), "an apple": (0, 7.5), "a sky": (0, -2.25)},
            "blue": {"a sky": (1, 3.0), "ein Löwe": (0, 0.5), "an apple": (0, 0.125)},
        },
    ),
    "pair": (
        [
            {"query": "red", "document": "an apple", "label": 2},
            {"query": "red", "document": "a sky", "label": 0},
            {"query": "blue", "document": "a sky", "label": 3},
            {"query": "red", "document": "blood", "label": 1},
            {"query": "red", "document": "an apple", "label": 1},
        ],
        {"red": {"an apple": (2, None), "blood": (1, None), "a sky": (0, None)}, "blue": {"a sky": (3, None)}},
    ),
    "scored pair": (
        [
            {"query": "red", "document": "an apple", "score": 0.75},
            {"query": "blue", "document": "a sky", "score": -1.5},
            {"query": "red", "document": "a sky", "score": 0.875},
        ],
        {"red": {"a sky": (1, 0.875), "an apple": (0, 0.75)}, "blue": {"a sky": (1, -1.5)}},
    ),
    "pos and neg": (
        [
            {"query": "red", "pos": ["an apple", "blood"], "neg": ["a sky"], "pos_scores": [4.0, 5.5],
             "neg_scores": [1.0], "prompt": "find:"},
            {"query": "blue", "pos": ["a sky"], "neg": ["an apple"], "pos_scores": [0.5], "neg_scores": [0.75],
             "prompt": "find:"},
        ],
        {
            "find: red": {"blood": (1, 5.5), "an apple": (1, 4.0), "a sky": (0, 1.0)},
            "find: blue": {"a sky": (1, 0.5), "an apple": (0, 0.75)},
        },
    ),
}  # fmt: skip


def write(path, records, kind):
    """Write records in a format; returns what `data.train` gets."""
    plain = [
        {key: json.dumps(value) if isinstance(value, list) else value for key, value in r.items()} for r in records
    ]
    path = path.with_suffix({"arrow stream": ".arrow", "jsonl.gz": ".jsonl.gz"}.get(kind, f".{kind}"))
    table = pa.Table.from_pylist(records)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind in ("arrow", "arrow stream"):
        new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(plain[0]))
            writer.writeheader()
            writer.writerows(plain)
    elif kind == "tsv":
        lines = ["\t".join(plain[0]), *("\t".join(str(value) for value in record.values()) for record in plain)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


FORMATS = ("parquet", "arrow", "arrow stream", "jsonl", "jsonl.gz", "csv", "tsv")


def load(folder, **options):
    return Rows(**{"val_queries": 0, "cache_dir": str(folder / "cache"), **options}).load()


def meaning(collection):
    """Query -> doc -> (grade, score), by texts."""
    found = {}
    for row, (query_id, text) in enumerate(collection.queries.items()):
        rows = collection.rows
        part = slice(int(rows.starts[row]), int(rows.starts[row] + rows.sizes[row]))
        docs = [rows.table.text(number) for number in rows.docs[part].tolist()]
        scores = rows.scores[part].tolist() if rows.scores is not None else [None] * len(docs)
        found[text] = dict(zip(docs, zip(rows.grades[part].tolist(), scores, strict=True), strict=True))
        by_id = {collection.docs[doc_id].text: grade for doc_id, grade in collection.qrels[query_id].items()}
        assert by_id == {doc: grade for doc, (grade, _) in found[text].items()}
        relevant = [doc for doc, (grade, _) in found[text].items() if grade >= collection.relevance]
        assert list(found[text])[: int(rows.positives[row])] == relevant, "relevant docs come first"
    return found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_in_each_format(tmp_path, shape, kind):
    records, expected = SHAPES[shape]
    collection = load(tmp_path, train=write(tmp_path / "rows", records, kind)).train
    assert meaning(collection) == expected
    texts = {doc for docs in expected.values() for doc in docs}
    assert {doc.text for doc in collection.docs} == texts and len(collection.docs) == len(texts), "equal texts: one doc"


def test_each_shape_from_a_folder_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    for shape, (records, expected) in SHAPES.items():
        folder = tmp_path / shape.replace(" ", "_")
        datasets.DatasetDict({"train": datasets.Dataset.from_list(records)}).save_to_disk(folder)
        assert meaning(load(tmp_path, train=str(folder)).train) == expected
        shuffled = datasets.Dataset.from_list(records).shuffle(seed=1)
        shuffled.save_to_disk(folder / "shuffled", num_shards=2)
        assert meaning(load(tmp_path, train=str(folder / "shuffled")).train) == expected


def test_a_name_of_the_hub_is_read_from_its_cached_files(tmp_path, monkeypatch):
    """Only the download is replaced: the package builds its Arrow files from a local file, as from a downloaded one."""
    datasets = pytest.importorskip("datasets")
    records, expected = SHAPES["list"]
    name, loaded, real = write(tmp_path / "rows", records, "parquet"), [], datasets.load_dataset

    def load_dataset(*arguments, split):
        loaded.append((*arguments, split))
        return real("parquet", data_files=name, split="train", cache_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert meaning(load(tmp_path, train="org/name").train) == expected
    assert meaning(load(tmp_path, train="org/name:config:part", test=None).train) == expected
    assert set(loaded) == {("org/name", None, "train"), ("org/name", "config", "part")}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_ids_with_two_tables(tmp_path, kind):
    docs = [{"id": i, "text": f"doc {i}"} for i in (7, 8)] + [{"id": 9, "text": "doc 7"}]
    queries = [{"qid": "q1", "text": "red"}, {"qid": "q2", "text": "blue"}, {"qid": "q3", "text": "left out"}]
    rows = [
        {"query_id": "q2", "document_ids": [9, 7], "scores": [0.5, 1.5]},
        {"query_id": "q1", "document_ids": [8, 9], "scores": [2.5, 2.25]},
    ]
    names = {
        key: write(tmp_path / key, records, kind)
        for key, records in (("train", rows), ("docs", docs), ("queries", queries))
    }
    train = load(tmp_path, **names).train
    assert dict(train.queries) == {"q2": "blue", "q1": "red"}
    assert {doc.doc_id: doc.text for doc in train.docs} == {"7": "doc 7", "8": "doc 8", "9": "doc 7"}
    assert dict(train.qrels) == {"q2": {"7": 1, "9": 0}, "q1": {"8": 1, "9": 0}}
    assert train.rows.scores.tolist() == [1.5, 0.5, 2.5, 2.25]
    assert "q3" not in train.queries and "7" in train.docs and "10" not in train.docs
    with pytest.raises(KeyError):
        train.queries["q3"]


def test_docs_of_a_table_have_their_titles(tmp_path):
    names = {
        "docs": write(tmp_path / "docs", [{"id": "a", "text": "b", "title": "T"}, {"id": "c", "text": "d"}], "jsonl"),
        "queries": write(tmp_path / "queries", [{"id": "q", "text": "red"}], "jsonl"),
        "train": write(tmp_path / "rows", [{"query_id": "q", "doc_ids": ["a", "c"], "labels": [2, 0]}], "jsonl"),
    }
    train = load(tmp_path, **names).train
    assert [doc.text for doc in train.docs] == ["T b", "d"] and train.qrels["q"] == {"a": 2, "c": 0}


# options
# ----------------------------------------------------------------------------------------------------------------------


def test_a_map_overrides_the_names(tmp_path, caplog):
    rows = [{"query": "no", "q": "red", "doc": "no", "answer": "an apple", "gold": 4, "label": 0}]
    name = write(tmp_path / "rows", rows, "jsonl")
    with caplog.at_level("INFO"):
        collection = load(tmp_path, train=name, columns={"query": "q", "document": "answer", "score": "gold"}).train
    assert meaning(collection) == {"red": {"an apple": (1, 4.0)}}
    assert "train: rows of the shape pair (query=q, document=answer, score=gold)" in caplog.text


def test_negatives_are_numbered_and_may_be_given(tmp_path):
    shape = recognise(["negative_10", "query", "negative_2", "positive", "id"], tmp_path)
    assert shape.columns["negative"] == ("negative_2", "negative_10")
    shape = recognise(["a", "b", "c", "d"], tmp_path, {"query": "a", "positive": "b", "negative": ["d", "c"]})
    assert shape.columns["negative"] == ("d", "c")


def test_relevance_of_scores_and_grades(tmp_path):
    scored, graded = (write(tmp_path / kind, SHAPES[kind][0], "jsonl") for kind in ("list", "pair"))
    by_score = load(tmp_path, train=scored, score_relevance=0.5).train
    assert {query: sum(grade for grade, _ in docs.values()) for query, docs in meaning(by_score).items()} == {
        "red": 2,
        "blue": 2,
    }
    by_grade = load(tmp_path, train=graded, relevance=2).train
    assert by_grade.relevance == 2 and by_grade.rows.positives.tolist() == [1, 1]


def test_validation_queries_are_taken_by_hash(tmp_path):
    rows = [{"query": f"q{i}", "document": f"d{i}", "label": 1} for i in range(50)]
    splits = load(tmp_path, train=write(tmp_path / "one", rows, "jsonl"), val_queries=None)
    other = load(tmp_path, train=write(tmp_path / "other", rows[::-1], "jsonl"), val_queries=None)
    assert len(splits.val.queries) == 5 and len(splits.train.queries) == 45
    assert set(splits.val.queries) == set(other.val.queries), "whatever the order of rows"
    assert not set(splits.val.queries) & set(splits.train.queries)
    assert set(splits.val.qrels) == set(splits.val.queries) and len(meaning(splits.val)) == 5
    held_out = next(iter(splits.val.queries))
    assert held_out not in splits.train.queries and held_out not in splits.train.qrels
    another = load(tmp_path, train=str(tmp_path / "one.jsonl"), val_queries=5, split_seed=1)
    assert set(another.val.queries) != set(splits.val.queries)


def test_several_test_sets_and_globs(tmp_path):
    for i in range(3):
        write(tmp_path / f"part{i}", [{"query": f"q{i}", "document": "d", "label": 1}], "jsonl")
    splits = load(
        tmp_path,
        train=str(tmp_path / "part[01].jsonl"),
        test={"mine": str(tmp_path / "part2.jsonl"), "other": [str(tmp_path / "part2.jsonl")] * 2}
    )  # fmt: skip
    assert list(splits.train.queries.values()) == ["q0", "q1"]
    assert {name: len(part.queries) for name, part in splits.tests.items()} == {"mine": 1, "other": 1}
    assert splits.train.docs is splits.tests["mine"].docs
    candidates = splits.tests["mine"].rows.candidates()
    assert dict(candidates) == {query_id: list(docs) for query_id, docs in splits.tests["mine"].qrels.items()}


def test_a_query_of_train_in_the_test_is_an_error(tmp_path):
    train, test = (
        write(tmp_path / name, [{"query": "red", "document": name, "label": 1}], "jsonl") for name in ("a", "b")
    )
    with pytest.raises(DataError, match=r"^rows: expected queries that train lacks, got 1 that both have"):
        load(tmp_path, train=train, test=test)


def test_candidates_are_in_the_order_of_trec_eval(tmp_path):
    name = write(tmp_path / "rows", SHAPES["list"][0], "jsonl")
    collection = load(tmp_path, test=name).tests["rows"]
    candidates = collection.rows.candidates()
    assert list(candidates) == list(collection.queries)
    for query_id in collection.queries:
        assert candidates[query_id] == sorted(collection.qrels[query_id], reverse=True)
        assert not candidates.scores_of(query_id).any()


def test_a_pair_that_comes_again_keeps_its_highest_score(tmp_path, caplog):
    rows = [{"query": "red", "document": doc, "score": score} for doc, score in (("a", 2.0), ("b", 3.0), ("a", -1.0))]
    for order in (rows, rows[::-1]):
        with caplog.at_level("INFO"):
            collection = load(tmp_path, train=write(tmp_path / "rows", order, "jsonl")).train
        assert meaning(collection) == {"red": {"b": (1, 3.0), "a": (0, 2.0)}}
        assert (
            "train: 1 pairs are repeated, and keep their highest grade and score; 0 of them had two grades"
            in caplog.text
        )


def test_files_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    name = write(tmp_path / "rows", SHAPES["pair"][0], "jsonl")
    before = load(tmp_path, train=name).train
    monkeypatch.setattr("ranker.data.sources.rows.build_rows", None)  # a second build would fail
    assert load(tmp_path, train=name).train.docs.fingerprint == before.docs.fingerprint
    monkeypatch.undo()
    write(tmp_path / "rows", SHAPES["pair"][0][:2], "jsonl")
    assert len(load(tmp_path, train=name).train.queries) == 1
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace("red", "sun"))  # of the same size
    assert list(load(tmp_path, train=name).train.queries.values()) == ["sun"]


def test_a_damaged_table_is_an_error(tmp_path):
    name = write(tmp_path / "rows", SHAPES["pair"][0], "jsonl")
    load(tmp_path, train=name)
    texts = next(tmp_path.glob("cache/rows-*/docs.texts"))
    texts.write_bytes(texts.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"docs.texts: expected CRC-32 .* it is built anew"):
        load(tmp_path, train=name)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_labels_true_and_false_are_1_and_0_and_no_scores(tmp_path, kind):
    rows = [{"query": "red", "document": doc, "label": doc == "blood"} for doc in ("a sky", "blood")]
    train = load(tmp_path, train=write(tmp_path / "rows", rows, kind)).train
    (judged,) = train.qrels.values()
    assert {train.docs[doc_id].text: grade for doc_id, grade in judged.items()} == {"a sky": 0, "blood": 1}
    scored = [{"query": "red", "document": "blood", "score": True}]
    with pytest.raises(DataError, match="column 'score': expected a finite number as score, got True"):
        load(tmp_path, train=write(tmp_path / "scored", scored, kind))


# mistakes
# ----------------------------------------------------------------------------------------------------------------------

GOOD = {"query": "red", "docs": ["a", "b"], "scores": [1.0, 0.0]}
PAIR_ROW = {"query": "red", "document": "a", "label": 1}
TRIPLE = {"query": "red", "positive": "a", "negative": ["b"]}
MISTAKES = {
    "no query": (GOOD, {"query": None}, "column 'query': expected a text, got None"),
    "blank query": (GOOD, {"query": " "}, "column 'query': expected a text, got ' '"),
    "no docs": (GOOD, {"docs": None}, "column 'docs': expected a list of at least one, got None"),
    "empty list": (GOOD, {"docs": []}, r"column 'docs': expected a list of at least one, got \[\]"),
    "nested null": (GOOD, {"docs": ["a", None]}, "column 'docs': expected a text, got None"),
    "uneven lists": (GOOD, {"scores": [1.0]}, "column 'scores': expected 2 numbers, one for each doc, got 1"),
    "score NaN": (GOOD, {"scores": [1.0, float("nan")]}, "column 'scores': expected a finite number as score, got nan"),
    "score inf": (GOOD, {"scores": [float("inf"), 1.0]}, "column 'scores': expected a finite number as score, got inf"),
    "score null": (GOOD, {"scores": [1.0, None]}, "column 'scores': expected a finite number as score, got None"),
    "huge score": (GOOD, {"scores": [1e39, 1.0]}, r"column 'scores': expected a score within single precision"),
    "no label": (PAIR_ROW, {"label": None}, "column 'label': expected a whole number as grade, got None"),
    "no document": (PAIR_ROW, {"document": None}, "column 'document': expected a text, got None"),
    "no positive": (TRIPLE, {"positive": None}, "column 'positive': expected a text, got None"),
    "no negatives": (TRIPLE, {"negative": []}, r"column 'negative': expected a list of at least one, got \[\]"),
    "negative null": (TRIPLE, {"negative": [None]}, "column 'negative': expected a text, got None"),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_file_row_and_column(tmp_path, mistake, kind):
    good, change, message = MISTAKES[mistake]
    name = write(tmp_path / "rows", [good, good, {**good, **change}], kind)
    place = f"{name}:3" if kind == "jsonl" else f"{name}: row 3"
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path, train=name)
    assert str(error.value).startswith(f"{place}: column ") and "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_a_label_that_is_a_fraction_is_refused(tmp_path):
    name = write(tmp_path / "rows", [{**PAIR_ROW, "label": 0.5}], "jsonl")
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'label': expected a whole number as grade, got 0.5; if"):
        load(tmp_path, train=name)


def test_rows_beyond_the_first_chunk_are_numbered(tmp_path):
    rows = [{"query": f"q{i}", "document": "d", "label": 1} for i in range(CHUNK + 10)]
    rows[CHUNK + 4]["document"] = None
    with pytest.raises(DataError, match=rf"rows.parquet: row {CHUNK + 5}: column 'document'"):
        load(tmp_path, train=write(tmp_path / "rows", rows, "parquet"))
    with pytest.raises(DataError, match=rf"rows.jsonl:{CHUNK + 5}: column 'document'"):
        load(tmp_path, train=write(tmp_path / "rows", rows, "jsonl"))


@pytest.mark.parametrize(
    ("text", "ending", "message"),
    [
        ("", ".jsonl", "expected rows, got an empty file"),
        ('{"query": "a"}\n', ".jsonl", "expected the columns of one shape.*got query, none of them"),
        ('{"query": "a", "document": "b", "label": 1}\n[1]\n', ".jsonl", ":2: expected a JSON object"),
        ("query\tdocument\tlabel\na\tb\n", ".tsv", ":2: expected 3 fields, as the header has, got 2"),
        ("query,document,label\na,b,x\n", ".csv", ":2: column 'label': expected a whole number as grade, got 'x'"),
        ('query,document,label\na,"b,1\n', ".csv", ":2: expected a row of CSV in UTF-8"),
        ("query,query\na,b\n", ".csv", ":1: expected a header of different names"),
        ("no parquet", ".parquet", "expected a whole parquet file"),
        ("no arrow", ".arrow", "expected a whole arrow file"),
        ("query,document\n", ".txt", "data.train: expected files that end in .parquet"),
    ],
)
def test_a_faulty_file_is_one_line(tmp_path, text, ending, message):
    path = tmp_path / f"rows{ending}"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path, train=str(path))
    assert "\n" not in str(error.value)


def test_columns_of_two_shapes_have_to_be_named(tmp_path):
    row = {**GOOD, "document": "a", "label": 1}
    with pytest.raises(DataError, match=r"got .*, those of several \(list and pair\); name them with data.columns"):
        load(tmp_path, train=write(tmp_path / "rows", [row], "jsonl"))
    with pytest.raises(DataError, match=r"expected the column 'docz' of data.columns, got query, docs, scores"):
        load(tmp_path, train=write(tmp_path / "rows", [GOOD], "jsonl"), columns={"query": "query", "docs": "docz"})
    with pytest.raises(DataError, match=r"data.columns: expected roles such as query, .*, got 'text'"):
        load(tmp_path, train=str(tmp_path / "rows.jsonl"), columns={"text": "query"})


def test_files_of_two_shapes_are_refused(tmp_path):
    names = [write(tmp_path / "a", [GOOD], "jsonl"), write(tmp_path / "b", [PAIR_ROW], "jsonl")]
    with pytest.raises(DataError, match=r"b.jsonl: expected rows of the shape list .*, as in a.jsonl, got pair"):
        load(tmp_path, train=names)


def test_unknown_and_repeated_ids_are_refused(tmp_path):
    names = {
        "docs": write(tmp_path / "docs", [{"id": "a", "text": "b"}], "jsonl"),
        "queries": write(tmp_path / "queries", [{"id": "q", "text": "red"}], "jsonl"),
    }
    rows = [{"query_id": "q", "doc_ids": ["a"], "scores": [1.0]}]
    for change, message in (
        ({"doc_ids": ["a", "z"], "scores": [1.0, 2.0]}, r"rows.jsonl:2: column 'doc_ids': .* got the unknown id"),
        ({"query_id": "p"}, r"rows.jsonl:2: column 'query_id': .* of data.queries, got the unknown id"),
        ({"query_id": None}, r"rows.jsonl:2: column 'query_id': expected an id, got None"),
        ({"doc_ids": [None]}, r"rows.jsonl:2: column 'doc_ids': expected an id, got None"),
        ({"doc_ids": ["a b"]}, r"rows.jsonl:2: column 'doc_ids': expected an id without white space"),
    ):  # fmt: skip
        name = write(tmp_path / "rows", [*rows, {**rows[0], **change}], "jsonl")
        with pytest.raises(DataError, match=message):
            load(tmp_path, train=name, **names)
    write(tmp_path / "docs", [{"id": "a", "text": "b"}, {"id": "a", "text": "c"}], "jsonl")
    with pytest.raises(DataError, match=r"docs.jsonl:2: column 'id': expected each id once, got 'a' again"):
        load(tmp_path, train=write(tmp_path / "rows", rows, "jsonl"), **names)
    with pytest.raises(DataError, match=r"expected data.docs and data.queries, the files with their texts"):
        load(tmp_path, train=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"expected data.docs and data.queries together"):
        load(tmp_path, train=str(tmp_path / "rows.jsonl"), docs="docs.jsonl")


def test_missing_files_are_named(tmp_path):
    for name in (str(tmp_path / "no.parquet"), str(tmp_path / "*.parquet")):
        with pytest.raises(DataError, match=r"data.train: expected files, got .*, which matches none"):
            Rows(train=name, cache_dir=str(tmp_path)).check()
    with pytest.raises(DataError, match=r"expected a folder that `datasets` saved \(with state.json\)"):
        Rows(train=str(tmp_path), cache_dir=str(tmp_path)).check()
    with pytest.raises(ConfigError, match="expected files for train, val or test, got none"):
        Rows()
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    with pytest.raises(DataError, match="expected files inside the folder"):
        Rows(train=str(tmp_path), cache_dir=str(tmp_path)).check()


# tables
# ----------------------------------------------------------------------------------------------------------------------


def test_keys_are_numbered_in_the_order_of_their_first_place():
    numbers, seen, rng = KeyNumbers(), {}, np.random.default_rng(0)
    for _ in range(40):
        texts = [f"t{i}" for i in rng.integers(0, 3000, rng.integers(1, 200))]
        expected = [seen.setdefault(text, len(seen)) for text in texts]
        found, new = numbers.add(key_of(texts))
        assert found.tolist() == expected and len(numbers) == len(seen)
        assert [expected[i] for i in new] == sorted({e for e in expected if e >= len(seen) - len(new)})
    assert numbers.find(key_of(["t-1"])).tolist() == [-1]


def test_equal_first_halves_of_a_hash_are_noticed():
    keys = key_of(["one", "two"])
    keys["high"][1] = keys["high"][0]
    with pytest.raises(DataError, match="got two that share 64 bits"):
        KeyNumbers().add(keys)
    numbers = KeyNumbers()
    numbers.add(keys[:1])
    with pytest.raises(DataError, match="got two that share 64 bits"):
        numbers.add(keys[1:])


def test_a_table_finds_each_text_by_its_id(tmp_path):
    writer = TextWriter(tmp_path, "docs")
    texts = [f"text {i} é" for i in range(500)] + [""]
    writer.add(texts[:300])
    assert writer.add(texts[200:]).tolist() == list(range(200, 501))
    table = TextTable(tmp_path, "docs", writer.close())
    ids = [table.id(number) for number in range(len(table))]
    assert len(set(ids)) == 501 and list(table.items()) == list(zip(ids, texts, strict=True))
    assert [table.find(text_id) for text_id in ids] == list(range(501))
    assert {table.find(other) for other in ("", "x", ids[0][:-1], ids[0].upper() + "0", None, "\ud800", "f" * 24)} == {
        -1
    }


def test_many_pairs_are_sorted_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr("ranker.data.row_pairs._PART", 64)
    rng = np.random.default_rng(0)
    rows = [
        {"query": f"q{rng.integers(30)}", "document": f"d{rng.integers(20)}", "label": int(rng.integers(4))}
        for _ in range(1500)
    ]
    expected = {}
    for row in rows:
        docs = expected.setdefault(row["query"], {})
        docs[row["document"]] = (max(docs.get(row["document"], (0,))[0], row["label"]), None)
    collection = load(tmp_path, train=write(tmp_path / "rows", rows, "parquet")).train
    assert meaning(collection) == expected and list(collection.queries.values()) == list(expected)


# training groups
# ----------------------------------------------------------------------------------------------------------------------


def groups_of(tmp_path, rows, options, **more):
    collection = load(tmp_path, train=write(tmp_path / "rows", rows, "jsonl")).train
    tokenizer = tiny_tokenizer()
    stores = [
        build_token_store(texts, tmp_path / name, tokenizer, 32, fingerprint=name)
        for name, texts in (
            ("queries", collection.queries.items()),
            ("docs", ((doc.doc_id, doc.text) for doc in collection.docs)),
        )
    ]
    sampler = RowGroups(collection.rows, *stores, options, **more)
    queries, docs = list(collection.queries.values()), [doc.text for doc in collection.docs]

    def draw(epoch):
        rows, labels = sampler.draw(epoch, np.arange(len(sampler)))
        return {
            queries[query]: [(docs[doc] if doc >= 0 else None, label) for doc, label in zip(*group, strict=True)]
            for query, group in zip(
                sampler.query_rows.tolist(), zip(rows.tolist(), labels.tolist(), strict=True), strict=True
            )
        }

    return sampler, draw


def test_a_positive_of_another_row_is_never_a_negative(tmp_path):
    _, draw = groups_of(tmp_path, SHAPES["contrast"][0], GroupOptions(num_docs=3))
    drawn = [draw(epoch) for epoch in range(20)]
    assert {group["red"][0] for group in drawn} == {("an apple", 1.0), ("blood", 1.0)}
    for group in drawn:
        assert {doc for doc, _ in group["red"][1:]} == {"a sky", 'grass, "green"'}
        assert [label for _, label in group["red"]] == [1.0, 0.0, 0.0]
    assert draw(3) == draw(3) and any(draw(0) != draw(epoch) for epoch in range(1, 20))


def test_labels_are_grades_or_scores(tmp_path):
    _, draw = groups_of(tmp_path, SHAPES["pair"][0], GroupOptions(num_docs=4, positives=2))
    assert set(draw(0)["red"]) == {("an apple", 2.0), ("blood", 1.0), ("a sky", 0.0), (None, 0.0)}
    assert {doc for doc, _ in draw(0)["red"][:2]} == {"an apple", "blood"}
    assert "blue" not in draw(0), "a query without another doc than relevant ones teaches no order"


def test_the_label_of_a_negative_grade_is_zero(tmp_path):
    rows = [{"query": "red", "document": doc, "label": label} for doc, label in (("a", 1), ("b", -2))]
    _, draw = groups_of(tmp_path, rows, GroupOptions(num_docs=2))
    assert draw(0)["red"] == [("a", 1.0), ("b", 0.0)]


def test_scored_rows_are_drawn_alike_with_their_scores(tmp_path):
    sampler, draw = groups_of(tmp_path, SHAPES["list"][0], GroupOptions(num_docs=2))
    pairs = {pair for epoch in range(30) for pair in draw(epoch)["blue"]}
    assert pairs == {("ein Löwe", 0.5), ("an apple", 0.125), ("a sky", 3.0)}
    assert all(len({doc for doc, _ in draw(epoch)["blue"]}) == 2 for epoch in range(30)), "no doc comes twice"
    assert len(sampler) == 2


def test_positives_and_negatives_keep_their_scores(tmp_path):
    _, draw = groups_of(tmp_path, SHAPES["pos and neg"][0], GroupOptions(num_docs=2))
    assert draw(0)["find: blue"] == [("a sky", 0.5), ("an apple", 0.75)]
    assert {draw(epoch)["find: red"][0] for epoch in range(10)} == {("an apple", 4.0), ("blood", 5.5)}


def test_alike_keeps_queries_with_one_doc(tmp_path):
    _, draw = groups_of(tmp_path, SHAPES["pair"][0], GroupOptions(num_docs=2), alike=True)
    assert draw(0)["blue"] == [("a sky", 3.0), (None, 0.0)]


def test_the_query_itself_is_no_negative(tmp_path):
    rows = [{"query": "red", "positive": "an apple", "negative": ["red", "blood"]}]
    _, draw = groups_of(tmp_path, rows, GroupOptions(num_docs=3))
    for epoch in range(5):
        assert sorted(draw(epoch)["red"], key=str) == [("an apple", 1.0), ("blood", 0.0), (None, 0.0)]


def test_depth_bounds_the_negatives_by_score(tmp_path):
    row = {"query": "red", "pos": ["p"], "neg": list("abcd"), "pos_scores": [9.0], "neg_scores": [1.0, 4.0, 2.0, 3.0]}
    _, draw = groups_of(tmp_path, [row], GroupOptions(num_docs=2, depth=2))
    assert {draw(epoch)["red"][1][0] for epoch in range(20)} == {"b", "d"}


def test_random_negatives_fill_groups_but_not_beside_a_teacher(tmp_path):
    rows = [*SHAPES["pair"][0], {"query": "sun", "document": "yellow", "label": 1}]
    _, draw = groups_of(tmp_path, rows, GroupOptions(num_docs=4, random_negatives=True))
    for query, group in draw(0).items():
        docs = [doc for doc, _ in group]
        assert len(set(docs)) == len(docs)
        assert query != "blue" or docs[0] == "a sky"
    (tmp_path / "more").mkdir()
    with pytest.raises(
        ConfigError, match=r"data.random_negatives: expected false with rows that have a teacher's scores"
    ):
        groups_of(tmp_path / "more", SHAPES["list"][0], GroupOptions(random_negatives=True))


def test_rows_without_any_contrast_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"expected queries with a relevant doc and another one, got none of 1 \(1 have"
    ):
        groups_of(tmp_path, [{**PAIR_ROW, "label": 0}], GroupOptions())
