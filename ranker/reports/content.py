"""The data of a page about one test set: values of queries, and ranked documents for the largest differences.

`set_content` collects the data while the runs are in memory. `fitted` cuts the data to the size that the page allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranker.data.ranking import rank_docs
from ranker.reports.charts import Chart

if TYPE_CHECKING:
    from ranker.data.collection import Docs
    from ranker.types import Qrels, Run

Values = Mapping[str, Mapping[str, float]]  # query_id -> measure -> value


@dataclass(frozen=True)
class Limits:
    """Bounds of a page; conf/report/page.yaml explains them."""

    queries: int = 2000
    depth: int = 10
    text_length: int = 500
    megabytes: float = 5.0


@dataclass(frozen=True)
class Texts:
    """The texts of a set: query_id -> text, and the docs."""

    queries: Mapping[str, str]
    docs: Docs


@dataclass(frozen=True)
class RankedSet:
    """The runs of one set, with their values.

    Args:
        name: Name of the set.
        runs: Label -> query_id -> doc_id -> score. If there are two runs, the first run is the baseline.
        qrels: query_id -> doc_id -> relevance.
        values: Label -> query_id -> measure -> value, for every judged query.
        relevance: Smallest grade that binary measures count as relevant.
        texts: Texts of queries and docs; None: the page shows ids.
    """

    name: str
    runs: Mapping[str, Run]
    qrels: Qrels
    values: Mapping[str, Values]
    relevance: int = 1
    texts: Texts | None = None

    def difference(self, query_id: str, measure: str) -> float:
        """Return the second run's value minus the first run's; for more runs, the largest minus the smallest value."""
        found = [values[query_id][measure] for values in self.values.values()]
        return max(found) - min(found) if len(found) > 2 else found[-1] - found[0]


@dataclass(frozen=True)
class Facts:
    """Facts about a set that are shown above its queries; see `ranker.reports.tables` and `ranker.reports.charts`."""

    tiles: Sequence[Mapping[str, str]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    charts: Sequence[Chart] = ()
    warnings: Sequence[str] = ()


@dataclass
class SetContent:
    """A page's data about one set.

    Args:
        name: Name of the set.
        runs: Labels of the runs.
        measures: Names of the measures; queries are sorted by the first measure.
        relevance: Smallest relevant grade.
        num_queries: Number of judged queries; `rows` may have fewer queries.
        rows: `[query_id, text, [[value of each measure] of each run]]` of each query, the largest absolute difference
            first.
        details: For each of the first rows: `terms`, the words to mark, and `docs`, a list of `[doc_id, grade or None,
            [rank in each run or None], [score in each run or None]]`.
        docs: doc_id -> (shortened title, shortened text); empty without texts.
        depth: Number of docs that are shown for each run.
        facts: Facts that are shown above the queries.
    """

    name: str
    runs: list[str]
    measures: list[str]
    relevance: int
    num_queries: int
    rows: list[list[Any]]
    details: list[dict[str, Any]]
    docs: dict[str, tuple[str, str]]
    depth: int
    facts: Facts = Facts()


def set_content(part: RankedSet, limits: Limits) -> SetContent:
    """Collect a page's data about a set, for at most `limits.queries` queries."""
    first = next(iter(part.values.values()), {})
    measures = list(next(iter(first.values()), {}))
    chosen = sorted(first, key=lambda query_id: (-abs(part.difference(query_id, measures[0])), query_id))
    chosen = chosen[: limits.queries] if measures else []
    names = part.texts.queries if part.texts is not None else {}
    rows = [
        [
            query_id,
            shortened(names.get(query_id, ""), limits.text_length),
            [[round(values[query_id][measure], 6) for measure in measures] for values in part.values.values()],
        ]
        for query_id in chosen
    ]
    docs: dict[str, tuple[str, str]] = {}
    details = [_detail(part, query_id, limits, docs) for query_id in chosen]
    return SetContent(
        part.name, list(part.runs), measures, part.relevance, len(first), rows, details, docs, limits.depth
    )


def _detail(part: RankedSet, query_id: str, limits: Limits, docs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the ranked docs of a query, and add their texts to `docs`."""
    judged = part.qrels.get(query_id, {})
    scores = [run.get(query_id, {}) for run in part.runs.values()]
    ranked = [rank_docs(docs_of_run) for docs_of_run in scores]
    ranks = [{doc_id: rank for rank, doc_id in enumerate(found, 1)} for found in ranked]
    shown = dict.fromkeys(doc_id for found in ranked for doc_id in found[: limits.depth])
    relevant = [doc_id for doc_id, grade in judged.items() if grade >= part.relevance and doc_id not in shown]
    relevant.sort(key=lambda doc_id: (min(found.get(doc_id, 1 << 40) for found in ranks), doc_id))
    detail: dict[str, Any] = {
        "docs": [
            [
                doc_id,
                judged.get(doc_id),
                [found.get(doc_id) for found in ranks],
                [_digits(found.get(doc_id)) for found in scores],
            ]
            for doc_id in [*shown, *relevant[: limits.depth]]
        ]
    }
    if part.texts is not None:
        for doc_id in (row[0] for row in detail["docs"]):
            if doc_id not in docs and doc_id in part.texts.docs:
                doc = part.texts.docs[doc_id]
                docs[doc_id] = shortened(doc.title, limits.text_length), shortened(doc.text, limits.text_length)
    return detail


def shortened(text: str, length: int) -> str:
    """Return a text with at most `length` characters; a longer text is cut and gets an ellipsis at its end.

    >>> shortened("abcdef", 4), shortened("abcd", 4)
    ('abc…', 'abcd')
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _digits(score: float | None) -> float | None:
    return None if score is None else float(f"{score:.6g}")


def with_terms(content: SetContent) -> SetContent:
    """Add to each query the words to mark in its documents; a set without texts does not change."""
    if content.docs:
        from ranker.reports.terms import Terms  # imported here, because pages without texts do not need bm25s

        terms = Terms()
        for row, detail in zip(content.rows, content.details, strict=False):
            texts = [part for shown in detail["docs"] for part in content.docs.get(shown[0], ())]
            detail["terms"] = terms.of(row[1], texts)
    return content


@dataclass(frozen=True)
class SetData:
    """A set's data in the page.

    Args:
        text: JSON that is safe inside a `<script>` element.
        rows: Number of queries in the data.
        details: Number of queries with documents.
    """

    text: str
    rows: int
    details: int


def fitted(content: SetContent, size: int) -> SetData:
    """Return a set's data for the page, with at most `size` bytes.

    Rows have priority. The rest has the documents of as many queries as fit, in the order of the rows. A doc is stored
    once, and queries refer to its number.
    """
    whole = _data(content, content.rows, content.details)
    text = in_script(whole)
    if len(text) * 4 > size and len(text.encode("utf-8", "replace")) > size:
        rows, details = _kept(content, size)
        return SetData(in_script(_data(content, rows, details)), len(rows), len(details))
    return SetData(text, len(content.rows), len(content.details))


def _kept(content: SetContent, size: int) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Return the rows and details that fit into `size` bytes."""
    left = size - _bytes(_data(content, [], []))
    rows: list[list[Any]] = []
    for row in content.rows:
        left -= _bytes(row)
        if left < 0:
            return rows, []
        rows.append(row)
    details: list[dict[str, Any]] = []
    stored: set[str] = set()
    for detail in content.details:
        new = {row[0] for row in detail["docs"]} - stored
        # an upper bound, because numbers will replace ids
        left -= _bytes(detail) + sum(_bytes([doc_id, *content.docs.get(doc_id, ())]) for doc_id in new)
        if left < 0:
            break
        stored |= new
        details.append(detail)
    return rows, details


def _data(content: SetContent, rows: list[list[Any]], details: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that the page's script reads."""
    numbers: dict[str, int] = {}
    for detail in details:
        for row in detail["docs"]:
            numbers.setdefault(row[0], len(numbers))
    return {
        "name": content.name,
        "runs": content.runs,
        "measures": content.measures,
        "relevance": content.relevance,
        "depth": content.depth,
        "queries": content.num_queries,
        "rows": rows,
        "details": [{**part, "docs": [[numbers[row[0]], *row[1:]] for row in part["docs"]]} for part in details],
        "docs": [[doc_id, *content.docs.get(doc_id, ())] for doc_id in numbers],
    }


def _bytes(value: Sequence[Any] | Mapping[str, Any]) -> int:
    return len(in_script(value).encode("utf-8", "replace")) + 1


def in_script(value: Any) -> str:
    r"""Return JSON that is safe inside a `<script>` element, because no part of the text can end the element.

    >>> in_script(["</script><!--", "a&b"])
    '["\\u003c/script\\u003e\\u003c!--","a\\u0026b"]'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
