"""The file: its numbers against ir_measures, hostile texts, no address of another file, whole or absent."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import ir_measures
import numpy as np
import pytest

from ranker.data.collection import Doc, MemoryDocs
from ranker.data.trec import read_run, write_qrels
from ranker.errors import DataError
from ranker.evaluation.report import write_evaluation
from ranker.reports import tables
from ranker.reports.content import Facts, Limits, RankedSet, Texts, set_content, with_terms
from ranker.reports.page import Page, render, write_page

MEASURES = ["nDCG@10", "RR@10", "AP@100"]
HOSTILE = ["<script>window.broken = 1</script>", "</script><script>window.broken = 2</script>", "<img src=x onerror=a>"]


class Reader(HTMLParser):
    """Collects the tables, the elements and the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[tuple[dict, str]] = []
        self._open: str | None = None
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open = tag
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        self._open = None
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data):
        if self._open == "caption":
            self._caption = data
        elif self._open in ("td", "th"):
            self._rows[-1][-1] += data
        elif self._open == "script":
            self.scripts.append((self.tags[-1][1], data))

    @property
    def data(self):
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "page-data"))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Folder, run, baseline and judgements of 20 queries, and the page about them."""
    folder = tmp_path_factory.mktemp("page")
    generator = np.random.default_rng(2)
    docs = MemoryDocs([Doc(f"d{i}", f"words {i} {HOSTILE[i % 3]}", HOSTILE[i % 2]) for i in range(30)])
    queries = {f"q{i}": f"query {i} {HOSTILE[i % 3]}" for i in range(20)}
    qrels = {q: {f"d{j}": int(generator.integers(0, 3)) for j in range(10)} for q in queries}
    run, baseline = ({q: {f"d{j}": float(generator.normal()) for j in range(30)} for q in queries} for _ in range(2))
    metrics = write_evaluation(folder, run, qrels, MEASURES, 1, baseline)
    rows = [json.loads(line) for line in (folder / "per_query.jsonl").read_text().splitlines()]
    values = {
        "first stage": {row["query_id"]: row["baseline"] for row in rows},
        "run": {row["query_id"]: row["measures"] for row in rows},
    }
    runs = {"first stage": baseline, "run": read_run(folder / "run.trec")}
    content = with_terms(set_content(RankedSet("<b>set", runs, qrels, values, 1, Texts(queries, docs)), Limits()))
    table = tables.measures(metrics, "run", "first stage")
    content.facts = Facts(tables.tiles(metrics), [table], warnings=["<script>"])
    page = Page(
        "<i>title", {"Run": "<u>"}, "ranker evaluate 'name=<x>'", "name: '<x>'\n", {"python": "3"}, (), None, [content]
    )
    return folder, run, baseline, qrels, page


def computed(folder, run, qrels):
    """Means and values of the queries, by ir_measures alone."""
    write_qrels(folder / "qrels.txt", qrels)
    measures = [ir_measures.parse_measure(name) for name in MEASURES]
    found = list(ir_measures.iter_calc(measures, ir_measures.read_trec_qrels(str(folder / "qrels.txt")), run))
    values = {(entry.query_id, str(entry.measure)): entry.value for entry in found}
    means = {name: np.mean([value for (_, of), value in values.items() if of == name]) for name in MEASURES}
    return means, values


def test_the_numbers_are_those_of_ir_measures(evaluated):
    folder, run, baseline, qrels, page = evaluated
    read = Reader(render(page, Limits()))
    (after, values), (before, first) = computed(folder, run, qrels), computed(folder, baseline, qrels)
    head, *rows = read.tables["Measures"]
    assert head[:4] == ["measure", "run", "first stage", "difference"]
    for row, name in zip(rows, MEASURES, strict=True):
        expected = [after[name], before[name], after[name] - before[name]]
        assert row[:4] == [name, f"{expected[0]:.4f}", f"{expected[1]:.4f}", f"{expected[2]:+.4f}"]
    (part,) = read.data
    assert part["runs"] == ["first stage", "run"] and part["measures"] == MEASURES and len(part["rows"]) == 20
    for query_id, _, (old, new) in part["rows"]:
        assert old == pytest.approx([first[query_id, name] for name in MEASURES], abs=1e-6)
        assert new == pytest.approx([values[query_id, name] for name in MEASURES], abs=1e-6)
    gains = [abs(new[0] - old[0]) for _, _, (old, new) in part["rows"]]
    assert gains == sorted(gains, reverse=True)


def test_hostile_texts_stay_texts(evaluated):
    read = Reader(render(evaluated[-1], Limits()))
    assert [attributes for attributes, _ in read.scripts] == [{"type": "application/json", "id": "page-data"}, {}]
    assert not {"img", "i", "b", "u", "x"} & {tag for tag, _ in read.tags}
    (part,) = read.data
    assert {doc[2].split(" ", 2)[2] for doc in part["docs"]} == set(HOSTILE)
    assert part["name"] == "<b>set"


def test_the_page_needs_no_other_file_and_runs_its_own_script_only(evaluated):
    text = render(evaluated[-1], Limits())
    read = Reader(text)
    for tag, attributes in read.tags:
        assert tag not in ("link", "iframe", "object", "base", "form"), tag
        assert not {"src", "onclick", "onload"} & attributes.keys(), attributes
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://", text)
    policy = next(attributes["content"] for tag, attributes in read.tags if "http-equiv" in attributes)
    own = base64.b64encode(hashlib.sha256(read.scripts[-1][1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{own}'" in policy


def test_the_page_is_bounded(evaluated):
    full, small = (render(evaluated[-1], Limits(megabytes=size)) for size in (5.0, 0.01))
    (part,) = Reader(small).data
    assert len(part["details"]) < len(part["rows"]) == 20
    assert f"The documents of {len(part['details'])} queries are in this page" in small
    assert "queries are in this page" not in full and len(small) < len(full)


def test_the_file_is_whole_or_absent(evaluated, tmp_path):
    path = write_page(tmp_path / "report.html", evaluated[-1], Limits())
    before = path.read_bytes()
    assert before.endswith(b"</html>\n") or before.endswith(b"</html>")
    broken = Page("x", {}, "", "", {}, (), None, [object()])  # fails while it is rendered
    with pytest.raises(AttributeError):
        write_page(path, broken, Limits())
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(DataError, match="expected a place to write to"):
        write_page(path / "below" / "report.html", evaluated[-1], Limits())


def test_a_lone_surrogate_is_replaced(evaluated, tmp_path):
    page = Page("\ud800", {}, "", "", {}, (), None, [])
    assert "<h1>?</h1>" in write_page(tmp_path / "report.html", page, Limits()).read_text(encoding="utf-8")
