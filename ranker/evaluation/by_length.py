"""Compute measures by the length of relevant docs, to see how well a run finds short and long docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ranker.evaluation.metrics import evaluate

if TYPE_CHECKING:
    from rich.console import Console

    from ranker.data.collection import Collection
    from ranker.types import Qrels, Run


@dataclass(frozen=True)
class Lengths:
    """Lengths of relevant docs, and the bounds of the length buckets.

    Args:
        bounds: Ascending numbers of words; bucket i has the docs of at least `bounds[i - 1]` and fewer than
            `bounds[i]`.
        words: Doc id -> words of title and text, separated by white space.
    """

    bounds: tuple[int, ...]
    words: dict[str, int]

    @classmethod
    def of(cls, collection: Collection, bounds: Sequence[int]) -> Lengths:
        """Count the words of the relevant docs of a collection."""
        relevant = {doc_id for judged in collection.qrels.values() for doc_id, grade in judged.items() if grade > 0}
        words = {
            doc_id: len(collection.docs[doc_id].full_text.split())
            for doc_id in sorted(relevant)
            if doc_id in collection.docs
        }
        return cls(tuple(bounds), words)

    def buckets(self) -> Iterator[tuple[int, int | None, set[str]]]:
        """Yield for each bucket its smallest number of words, the next bucket's (or None), and the docs."""
        ends: list[int | None] = [0, *self.bounds, None]
        for low, high in pairwise(ends):
            assert low is not None
            yield (
                low,
                high,
                {doc_id for doc_id, words in self.words.items() if low <= words and (high is None or words < high)},
            )


def measures_by_length(
    runs: Sequence[Run], qrels: Qrels, lengths: Lengths, measures: Sequence[str], relevance: int
) -> list[dict[str, Any]]:
    """Measure runs in each bucket of lengths.

    A query is measured in a bucket if the bucket has a relevant doc of the query. Relevant docs of other buckets are
    removed from the judgements and from the run, so they neither help nor harm. All docs that are not relevant stay.

    Args:
        runs: One or two runs, each query_id -> doc_id -> score. The result has the means of the first run under
            `measures` and the means of the second run under `baseline`.
        qrels: query_id -> doc_id -> relevance; grades above 0 are relevant.
        lengths: Lengths of the relevant docs.
        measures: ir-measures names.
        relevance: Smallest grade that binary measures count as relevant.

    Returns:
        A dict for each bucket that contains a query. `words` has the smallest number of words of this bucket, and that
        of the next bucket (None for the last). `num_queries` and `num_docs` (relevant docs) are counts. Then come the
        means.
    """
    rows = []
    for low, high, docs in lengths.buckets():
        kept = {
            query_id: {doc_id: grade for doc_id, grade in judged.items() if grade <= 0 or doc_id in docs}
            for query_id, judged in qrels.items()
            if any(grade > 0 and doc_id in docs for doc_id, grade in judged.items())
        }
        if not kept:
            continue
        row: dict[str, Any] = {"words": [low, high], "num_queries": len(kept)}
        row["num_docs"] = sum(grade > 0 for judged in kept.values() for grade in judged.values())
        for name, run in zip(("measures", "baseline"), runs, strict=False):
            left = {
                query_id: {
                    doc_id: score
                    for doc_id, score in run.get(query_id, {}).items()
                    if qrels[query_id].get(doc_id, 0) <= 0 or doc_id in docs
                }
                for query_id in kept
            }
            row[name] = evaluate(left, kept, list(measures), relevance).means
        rows.append(row)
    return rows


def print_by_length(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the first measure of each bucket."""
    from rich.table import Table

    measure = next(iter(rows[0]["measures"]))
    table = Table(title=f"{measure} by words of relevant docs", title_justify="left")
    for heading in ("words", "queries", "docs", "run", *(["baseline"] if "baseline" in rows[0] else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["words"]
        values = [row[name][measure] for name in ("measures", "baseline") if name in row]
        words = f"{low} or more" if high is None else f"{low} to {high - 1}"
        table.add_row(words, str(row["num_queries"]), str(row["num_docs"]), *(f"{value:.4f}" for value in values))
    console.print(table)
