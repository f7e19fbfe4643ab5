"""What a page holds of a set: ranks, grades and differences by hand; bounds of queries, texts and bytes."""

import json

import pytest

from ranker.data.collection import Doc, MemoryDocs
from ranker.reports.content import Limits, RankedSet, Texts, fitted, in_script, set_content, with_terms
from ranker.reports.terms import Terms

DOCS = MemoryDocs([Doc(f"d{i}", f"text {i} " + "x" * 50, f"title {i}") for i in range(8)])
QUERIES = {"q1": "first text", "q2": "second", "q3": "third"}
BEFORE = {"q1": {"d0": 4.0, "d1": 3.0, "d2": 2.0, "d3": 1.0}, "q2": {"d4": 1.0, "d5": 1.0}}
AFTER = {"q1": {"d0": 0.1, "d1": 0.2, "d2": 0.3, "d3": 0.123456789}, "q2": {"d4": 1.0, "d5": 1.0}}
QRELS = {"q1": {"d2": 2, "d1": 0, "d7": 1, "d3": 1}, "q2": {"d4": 1}, "q3": {"d6": 1}}
VALUES = {
    "before": {"q1": {"RR": 1 / 3}, "q2": {"RR": 0.5}, "q3": {"RR": 0.0}},
    "after": {"q1": {"RR": 1.0}, "q2": {"RR": 0.5}, "q3": {"RR": 0.0}},
}
PART = RankedSet("mine", {"before": BEFORE, "after": AFTER}, QRELS, VALUES, texts=Texts(QUERIES, DOCS))


def test_a_query_by_hand():
    """d3 and d7 are relevant and below rank 2, and d7 is in no run; in q2, the larger id of a tie comes first."""
    content = set_content(PART, Limits(depth=2))
    assert content.rows == [
        ["q1", "first text", [[0.333333], [1.0]]],
        ["q2", "second", [[0.5], [0.5]]],
        ["q3", "third", [[0.0], [0.0]]],
    ]
    assert content.details[0]["docs"] == [
        ["d0", None, [1, 4], [4.0, 0.1]],
        ["d1", 0, [2, 2], [3.0, 0.2]],
        ["d2", 2, [3, 1], [2.0, 0.3]],
        ["d3", 1, [4, 3], [1.0, 0.123457]],
        ["d7", 1, [None, None], [None, None]],
    ]
    assert content.details[1]["docs"] == [["d5", None, [1, 1], [1.0, 1.0]], ["d4", 1, [2, 2], [1.0, 1.0]]]
    assert content.details[2]["docs"] == [["d6", 1, [None, None], [None, None]]]


def test_the_queries_with_the_largest_differences_are_kept():
    values = {"a": {f"q{i}": {"RR": 0.5} for i in range(5)}, "b": {}}
    values["b"] = {f"q{i}": {"RR": 0.5 + change} for i, change in enumerate([0.0, -0.4, 0.3, 0.0, -0.1])}
    content = set_content(RankedSet("x", {"a": {}, "b": {}}, {}, values), Limits(queries=3))
    assert [row[0] for row in content.rows] == ["q1", "q2", "q4"] and content.num_queries == 5
    three = {**values, "c": {f"q{i}": {"RR": 0.5 + change} for i, change in enumerate([0.0, 0.0, 0.0, 0.5, 0.0])}}
    content = set_content(RankedSet("x", {name: {} for name in "abc"}, {}, three), Limits(queries=2))
    assert [row[0] for row in content.rows] == ["q3", "q1"]


def test_a_set_without_judgements_has_no_rows():
    content = set_content(RankedSet("x", {"run": AFTER}, {}, {"run": {}}), Limits())
    assert (content.rows, content.measures, content.num_queries) == ([], [], 0)
    assert json.loads(fitted(content, 1000).text)["rows"] == []


def test_texts_are_cut_and_a_doc_is_stored_once():
    content = set_content(PART, Limits(text_length=10))
    assert content.docs["d0"] == ("title 0", "text 0 xx…")
    data = json.loads(fitted(content, 100_000).text)
    assert sorted(doc[0] for doc in data["docs"]) == [f"d{i}" for i in range(8)]
    place = data["details"][0]["docs"][0][0]
    assert data["docs"][place] == ["d0", "title 0", "text 0 xx…"]


@pytest.mark.parametrize("size", [1500, 3000, 20_000])
def test_the_data_fit_into_their_bytes(size):
    """Texts of characters that JSON in a script has to escape, or that take several bytes in UTF-8."""
    docs = MemoryDocs([Doc(f"d{i}", "<&>" * 40 + "é文" * 20) for i in range(40)])
    run = {f"q{i}": {f"d{(i + j) % 40}": float(j) for j in range(5)} for i in range(30)}
    values = {"run": {query_id: {"RR": i / 30} for i, query_id in enumerate(run)}}
    part = RankedSet("x", {"run": run}, {}, values, texts=Texts(dict.fromkeys(run, "<b>"), docs))
    found = fitted(set_content(part, Limits()), size)
    assert len(found.text.encode()) <= size
    data = json.loads(found.text)
    assert (found.rows, found.details) == (len(data["rows"]), len(data["details"]))
    assert len(data["details"]) <= len(data["rows"]) <= 30
    if size == 20_000:
        assert 0 < len(data["details"]) < 30 == len(data["rows"])
    shown = {place for detail in data["details"] for place, *_ in detail["docs"]}
    assert shown == set(range(len(data["docs"])))


def test_a_script_element_can_not_be_ended():
    texts = ["</script><script>alert(1)</script>", "<!--", "\u2028", "a&b"]
    written = in_script(texts)
    assert not set("<>&\u2028") & set(written) and json.loads(written) == texts


def test_words_match_as_in_bm25():
    """Stems match, stop words do not; in scripts without spaces, pairs of characters do."""
    terms = Terms()
    texts = ["The users' PASSWORDS were stolen, and not", "Password; user_name", "東京都の人"]
    assert terms.of("the stolen password of a user", texts) == ["password", "passwords", "stolen", "users"]
    assert terms.of("京都", texts) == ["京都"]
    assert terms.of("of the", texts) == []


def test_only_sets_with_texts_have_words():
    assert with_terms(set_content(PART, Limits())).details[0]["terms"] == ["text"]
    without = RankedSet("mine", PART.runs, QRELS, VALUES)
    content = with_terms(set_content(without, Limits()))
    assert content.docs == {} and "terms" not in content.details[0] and content.rows[0][1] == ""
