"""Labels of the tasks on names, mentions and facts, and of imported files, on texts whose answers are known."""

import gzip
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ranker.errors import ConfigError, DataError
from ranker.probing.examples import ProbeExample, Span, Target, TaskUnavailable, read_examples, write_examples
from ranker.probing.spacy_model import MODEL, forget, missing
from ranker.probing.tasks.coref import Coreference, Mention, mentions, resolve
from ranker.probing.tasks.fact import FactChecking
from ranker.probing.tasks.fact_synth import SyntheticFacts, claim_of
from ranker.probing.tasks.gap import Gap
from ranker.probing.tasks.jsonl import JsonLines
from ranker.probing.tasks.ner import ONTONOTES, NamedEntities
from ranker.probing.tasks.ner_rules import RULES, RuleEntities, entities
from tests.unit.probing.mini import mini_sample

SHARED = Path(__file__).resolve().parents[3] / "../shared/data"
needs_spacy = pytest.mark.skipif(bool(missing()), reason=missing() or "spaCy is there")
SAMPLE = mini_sample()


def texts_of(example: ProbeExample) -> list[tuple[str | None, list[str]]]:
    return [(target.label, [example.text_of(span) for span in target.spans]) for target in example.targets]


@needs_spacy
def test_ner_finds_the_planted_names() -> None:
    examples = list(NamedEntities().examples(SAMPLE))
    assert len(examples) == len(SAMPLE.pairs)
    found = [(target.label, example.text_of(target.spans[0])) for example in examples for target in example.targets]
    for name, kind in (("Alice Morgan", "PERSON"), ("Paris", "GPE"), ("Monday", "DATE"), ("7 years", "DATE")):
        assert (kind, name) in found
    assert {label for label, _ in found} <= set(ONTONOTES)
    assert len(ONTONOTES) == 18
    for example in examples:
        for target in example.targets:
            (span,) = target.spans
            assert example.text_of(span) == example.text_of(span).strip(), (
                "no entity crosses the border of query and doc"
            )


@needs_spacy
def test_tasks_on_the_same_texts_share_one_reading(caplog: pytest.LogCaptureFixture) -> None:
    forget()
    with caplog.at_level("INFO"):
        for task in (NamedEntities(), Coreference(), NamedEntities(max_targets=1)):
            list(task.examples(SAMPLE))
        assert caplog.text.count("spaCy: reading") == 1
        forget()
        list(NamedEntities().examples(SAMPLE))
        assert caplog.text.count("spaCy: reading") == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The French language, French people", [("LANGUAGE", "French"), ("NORP", "French")]),
        ("at 5:30 pm, 3 hours or 7 years", [("TIME", "5:30 pm"), ("TIME", "3 hours"), ("DATE", "7 years")]),
        ("$20,000 and 5 percent of 12 km", [("MONEY", "$20,000"), ("PERCENT", "5 percent"), ("QUANTITY", "12 km")]),
        ("the 3rd of two in the 1990s", [("ORDINAL", "3rd"), ("CARDINAL", "two"), ("DATE", "1990s")]),
        (
            "Mary Smith of Harvard University in New York",
            [("PERSON", "Mary Smith"), ("ORG", "Harvard University"), ("GPE", "New York")],
        ),
        ("romania, Parisian, a2 and x10", []),
    ],
)
def test_entities_by_rule(text: str, found: list[tuple[str, str]]) -> None:
    assert [(kind, text[start:end]) for kind, start, end in entities(text)] == found


def test_rules_find_the_planted_names_under_ontonotes_types() -> None:
    assert set(RULES) < set(ONTONOTES)
    found = {
        (target.label, example.text_of(target.spans[0]))
        for example in RuleEntities().examples(SAMPLE)
        for target in example.targets
    }
    assert {("PERSON", "Alice Morgan"), ("GPE", "Paris"), ("DATE", "Monday"), ("DATE", "7 years")} <= found


def test_made_claims() -> None:
    assert claim_of("No thing here. He met Ann Lee in Rome.", 40) == ("He met Ann Lee in Rome.", "name", 7, 14)
    assert claim_of("He met Ann Lee in Rome.", 3) is None
    examples = list(SyntheticFacts().examples(SAMPLE))
    labels = [example.targets[0].label for example in examples]
    assert abs(labels.count("SUPPORTS") - labels.count("REFUTES")) <= 1
    for example in examples:
        assert (example.query in example.doc) == (example.targets[0].label == "SUPPORTS")
        blank = [re.sub(r"\d+", "N", text) for text in (example.query, example.doc)]
        assert blank[0] in blank[1], "only the number differs"


@needs_spacy
def test_coref_head_rule() -> None:
    task = Coreference()
    examples = list(task.examples(SAMPLE))
    for example in examples:
        for target in example.targets:
            first, second = (example.text_of(span) for span in target.spans)
            assert [span.side for span in target.spans] == ["query", "doc"]
            if target.label == "1" and second.lower() != "it":
                assert first.split()[-1].lower() == second.split()[-1].lower(), "equal heads"
            if target.label == "0":
                assert not set(first.lower().split()) & set(second.lower().split())
    labels = [target.label for example in examples for target in example.targets]
    assert labels.count("0") == pytest.approx(labels.count("1"), rel=0.05), "one negative for each positive"
    assert list(task.examples(SAMPLE)) == examples, "draws are seeded"


@needs_spacy
def test_coref_pronouns_and_copies() -> None:
    import spacy

    pipeline = spacy.load(MODEL)
    query, doc = (
        pipeline("Who repaired the old engine?"),
        pipeline("The engine was broken. It failed twice, and they sold it."),
    )
    found = {
        doc.text[t.spans[1].start : t.spans[1].end]
        for t in Coreference(max_positives=9).targets(query, doc, random.Random(0))
        if t.label == "1"
    }
    assert "engine" in found
    assert "It" in found, "its nearest earlier mention is the engine"
    strict = Coreference(exclude_copies=True)
    assert strict.name != Coreference().name
    copies = pipeline("Who repaired the engine?")
    left = {
        doc.text[t.spans[1].start : t.spans[1].end]
        for t in strict.targets(copies, doc, random.Random(0))
        if t.label == "1"
    }
    assert "engine" not in left
    assert next(mention.text for mention in mentions(doc)) == "engine", "articles are no part of a mention"


def test_pronouns_take_the_nearest_compatible_mention() -> None:
    def mention(text: str, **kinds: bool) -> Mention:
        return Mention(0, 1, text, text, frozenset([text]), **kinds)

    told = [
        mention("engine"),
        mention("alice", person=True),
        mention("it", pronoun=True),
        mention("she", pronoun=True, person=True),
        mention("they", pronoun=True, plural=True),
    ]
    assert resolve(told) == ["engine", "alice", "engine", "alice", None]


def test_missing_pipeline_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TaskUnavailable, match=r"expected the package 'spacy'.*pip install -e '\.\[probe\]'"):
        list(NamedEntities().examples(SAMPLE))


# gold coreference
# --------------------------------------------------------------------------------------------------------------

GAP_COLUMNS = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"


def write_gap(folder: Path, text: str = 'Ann said "Bea lost her bag".', offset: int = 19) -> None:
    line = f"x-1\t{text}\ther\t{offset}\tAnn\t0\tFALSE\tBea\t10\tTRUE\thttp://x"
    for name in ("gap-development.tsv", "gap-validation.tsv", "gap-test.tsv.gz"):
        content = f"{GAP_COLUMNS}\n{line}\n".encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)


def test_gap_by_hand(tmp_path: Path) -> None:
    write_gap(tmp_path)
    examples = list(Gap(str(tmp_path)).examples(SAMPLE))
    assert [example.part for example in examples] == ["train", "val", "test"]
    assert texts_of(examples[0]) == [("0", ["her", "Ann"]), ("1", ["her", "Bea"])], "quotes are part of the text"
    assert examples[0].query == ""
    write_gap(tmp_path, offset=18)
    with pytest.raises(DataError, match=r"gap-development\.tsv:2: .*'her' at character 18"):
        list(Gap(str(tmp_path)).examples(SAMPLE))
    with pytest.raises(TaskUnavailable, match=r"probe\.gap\.path"):
        _ = Gap(str(tmp_path / "none")).labeller


@pytest.mark.skipif(not (SHARED / "probing/gap").is_dir(), reason="needs ../shared/data/probing/gap")
def test_gap_as_published() -> None:
    examples = list(Gap(str(SHARED / "probing/gap")).examples(SAMPLE))
    assert [sum(example.part == part for example in examples) for part in ("train", "val", "test")] == [2000, 454, 2000]
    first = next(example for example in examples if example.doc_id == "validation-1")
    assert texts_of(first) == [("0", ["him", "Jose de Venecia Jr"]), ("0", ["him", "Abalos"])]


# facts
# --------------------------------------------------------------------------------------------------------------


def write_labels(folder: Path, labels: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "docs.jsonl").write_text(
        '{"id": "d1", "text": "Cats purr.", "title": "Cats"}\n{"id": "d2", "text": "Dogs bark."}\n'
    )
    (folder / "queries.tsv").write_text("q1\tCats bark\nq2\tDogs bark\n")
    (folder / "labels.tsv").write_text(labels)
    return folder


def test_fact_from_labels(tmp_path: Path) -> None:
    folder = write_labels(
        tmp_path / "a",
        "query_id\tdoc_id\tlabel\tsplit\nq1\td1\tCONTRADICT\ttrain\nq2\td2\tSUPPORT\ttest\nq2\tgone\tSUPPORT\ttest\n",
    )
    examples = list(FactChecking(str(folder)).examples(SAMPLE))
    assert [(e.query, e.doc, e.targets[0].label, e.part) for e in examples] == [
        ("Cats bark", "Cats Cats purr.", "CONTRADICT", "train"), ("Dogs bark", "Dogs bark.", "SUPPORT", "test"),
    ]  # fmt: skip
    before = FactChecking(str(folder)).labeller
    for name in ("docs.jsonl", "queries.tsv"):
        kept = (folder / name).read_text()
        (folder / name).write_text(kept.replace("Dogs", "Wolves"))
        assert FactChecking(str(folder)).labeller != before, "texts are part of the data"
        (folder / name).write_text(kept)
    assert FactChecking(str(folder)).labeller == before
    write_labels(folder, "query_id\tdoc_id\tlabel\nq1\td1\tSUPPORT\n")
    assert FactChecking(str(folder)).labeller != before
    write_labels(folder, "query_id\tdoc_id\tlabel\nq1\td1\n")
    with pytest.raises(DataError, match=r"labels\.tsv:2: expected 3 columns, got 2"):
        list(FactChecking(str(folder)).examples(SAMPLE))
    with pytest.raises(TaskUnavailable, match=r"probe\.fact\.path"):
        list(FactChecking().examples(SAMPLE))


@pytest.mark.parametrize("label", ["NOT ENOUGH INFO", "not_enough_info", "NEI", "", " "])
def test_a_label_without_a_verdict_is_no_class(tmp_path: Path, label: str) -> None:
    folder = write_labels(tmp_path / "a", f"query_id\tdoc_id\tlabel\nq1\td1\t{label}\nq2\td2\tSUPPORT\n")
    assert [(e.query_id, e.targets[0].label) for e in FactChecking(str(folder)).examples(SAMPLE)] == [("q2", "SUPPORT")]
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "Cats purr."}\n')
    queries = [
        {"_id": "q1", "text": "Cats bark", "metadata": {"label": label}},
        {"_id": "q2", "text": "Cats purr", "metadata": {"label": "SUPPORTS"}},
    ]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels/train.tsv").write_text("q1\t1\t1\nq2\t1\t1\n")
    assert [(e.query_id, e.targets[0].label) for e in FactChecking(str(tmp_path)).examples(SAMPLE)] == [
        ("q2", "SUPPORTS")
    ]


def test_fact_from_a_beir_folder(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "1", "title": "Cats", "text": "They purr."}\n{"_id": "2", "text": "Dogs bark."}\n'
    )
    queries = [
        {"_id": "q1", "text": "Cats purr", "metadata": {"label": "SUPPORTS"}},
        {"_id": "q2", "text": "Dogs purr", "metadata": {"2": [{"sentences": [0], "label": "CONTRADICT"}]}},
        {"_id": "q3", "text": "Cows moo", "metadata": {"label": "NOT ENOUGH INFO"}},
    ]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t1\t1\nq3\t1\t1\n")
    (tmp_path / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nq2\t2\t1\nq2\t1\t1\n")
    examples = list(FactChecking(str(tmp_path)).examples(SAMPLE))
    assert [(e.query_id, e.doc, e.targets[0].label, e.part) for e in examples] == [
        ("q2", "Dogs bark.", "CONTRADICT", "val"), ("q1", "Cats They purr.", "SUPPORTS", "train"),
    ]  # fmt: skip
    before = FactChecking(str(tmp_path)).labeller
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "3", "text": "Cows moo."}\n')
    assert FactChecking(str(tmp_path)).labeller != before
    (tmp_path / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nq2\t2\n")
    with pytest.raises(
        DataError, match=r"dev\.tsv:2: expected query-id, corpus-id and a whole number between tabs, got 'q2\\t2'"
    ):
        list(FactChecking(str(tmp_path)).examples(SAMPLE))


@pytest.mark.skipif(not (SHARED / "scifact/labels.tsv").is_file(), reason="needs ../shared/data/scifact")
def test_fact_of_scifact() -> None:
    examples = list(FactChecking(str(SHARED / "scifact")).examples(SAMPLE))
    assert len(examples) == 773
    assert [sum(example.part == part for example in examples) for part in ("train", "test")] == [564, 209]
    assert {example.targets[0].label for example in examples} == {"SUPPORT", "CONTRADICT"}


# imports
# --------------------------------------------------------------------------------------------------------------


def test_examples_round_trip(tmp_path: Path) -> None:
    examples = [
        ProbeExample(
            "q", "d", "who is she", "Ann\u2028 Bea", (Target((Span("query", 7, 10), Span("doc", 5, 8)), "1"),), "val"
        ),
        ProbeExample(
            "q",
            "e",
            "",
            "naïve 'quotes\"",
            (Target((Span("doc"),), value=0.1), Target((Span("doc", 0, 5),), value=-2.0)),
        ),
    ]
    write_examples(tmp_path / "x.jsonl", examples, "someone@1")
    assert list(read_examples(tmp_path / "x.jsonl")) == examples
    assert json.loads((tmp_path / "x.jsonl").read_text().split("\n")[0])["info"] == {
        "qid": "q",
        "pid": "d",
        "source": "someone@1",
        "part": "val",
    }
    task = JsonLines(str(tmp_path / "x.jsonl"), name="mine")
    assert list(task.examples(SAMPLE)) == examples
    assert task.classes is None


def test_of_a_longer_file_records_are_drawn_from_all_parts(tmp_path: Path) -> None:
    """As published data sets are ordered: first all training records, then the others."""
    parts = ["train"] * 600 + ["val"] * 200 + ["test"] * 200
    examples = [
        ProbeExample(f"q{i}", "d", "who", "Ann", (Target((Span("doc"),), str(i % 2)),), part)
        for i, part in enumerate(parts)
    ]
    write_examples(tmp_path / "x.jsonl", examples, "someone@1")
    task, sample = JsonLines(str(tmp_path / "x.jsonl")), replace(SAMPLE, max_pairs=500)
    drawn = list(task.examples(sample))
    assert len(drawn) == 500
    assert drawn == [example for example in examples if example in drawn], "in the file's order, none twice"
    for part, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
        assert sum(example.part == part for example in drawn) / 500 == pytest.approx(share, abs=0.06)
    assert list(task.examples(sample)) == drawn != list(task.examples(replace(sample, seed=1)))


@needs_spacy
def test_published_spans_in_words_become_characters(tmp_path: Path) -> None:
    """Words of query + " " + passage: Who(0) does(1) n't(2) bark(3) ?(4) The(5) dog(6) ,(7) i.e.(8) Rex(9) .(10)"""
    record = {
        "info": {"qid": 3, "pid": 7, "source": "x"},
        "input": {"query": "Who doesn't bark?", "passage": "The dog, i.e. Rex."},
    }
    targets = [
        {"span1": [1, 3], "span2": [9, 10], "label": "same"},
        {"label": "whole"},
        {"span1": [5, 7], "span2": [3, 5], "label": "other"},
    ]
    path = tmp_path / "published.jsonl"
    path.write_text(json.dumps({**record, "targets": targets}))
    (example,) = JsonLines(str(path), spans="spacy_tokens").examples(SAMPLE)
    assert texts_of(example) == [
        ("same", ["doesn't", "Rex"]),
        ("whole", ["Who doesn't bark?", "The dog, i.e. Rex."]),
        ("other", ["The dog", "bark?"]),
    ]
    assert (example.query_id, example.doc_id) == ("3", "7")
    path.write_text(json.dumps({**record, "targets": [{"span1": [3, 6], "label": "x"}]}))
    with pytest.raises(DataError, match=r"published\.jsonl:1: expected a span inside the query or the passage"):
        list(JsonLines(str(path), spans="spacy_tokens").examples(SAMPLE))


def record(target: str) -> str:
    return '{"info": {"qid": 1, "pid": 2}, "input": {"passage": "ab"}, "targets": [' + target + "]}"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "expected a JSON object"),
        ('{"info": {"qid": 1}}', "a record without"),
        (
            record('{"span1": {"side": "doc", "start": 0, "end": 3}, "label": "x"}'),
            "inside the doc's 2 characters",
        ),
        (record('{"span1": {"side": "title"}, "label": "x"}'), "side to be query or doc"),
        (record('{"span1": {"side": "doc"}}'), "exactly one of label and value"),
    ],
)
def test_broken_records_are_named_by_line(tmp_path: Path, line: str, complaint: str) -> None:
    good = record('{"span1": {"side": "doc"}, "label": "x"}')
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:2: .*{complaint}"):
        list(JsonLines(str(path)).examples(SAMPLE))
    with pytest.raises(TaskUnavailable, match=r"probe\.jsonl\.path"):
        list(JsonLines(str(tmp_path / "none")).examples(SAMPLE))
    with pytest.raises(ConfigError, match=r"probe\.jsonl\.spans"):
        JsonLines(str(path), spans="words")
