"""Pictures of an evaluation, PNG files in `pictures/`: gains per query, rank changes and lengths of relevant docs.

The functions that compute the numbers do not use matplotlib, so that tests can check the numbers. Only the drawing
functions import matplotlib.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.ranking import rank_docs
from ranker.evaluation.figures import BLUE, GREEN, GREY, ORANGE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranker.types import Qrels, Run


def gains(per_query: Sequence[Mapping[str, Any]], measure: str) -> list[tuple[str, float]]:
    """Return (query_id, value minus baseline value) of each query, best first; equal gains are sorted by id.

    >>> values = [("q1", 0.5, 1.0), ("q2", 1.0, 0.25)]
    >>> gains([{"query_id": q, "measures": {"RR": a}, "baseline": {"RR": b}} for q, a, b in values], "RR")
    [('q2', 0.75), ('q1', -0.5)]
    """
    pairs = [
        (str(row["query_id"]), row["measures"][measure] - row["baseline"][measure])
        for row in per_query
        if "baseline" in row
    ]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def draw_gains(query_gains: Sequence[tuple[str, float]], measure: str, title: str) -> Figure:
    """Draw a bar for each query, with the best gain on the left; gains are blue, losses are orange."""
    values = np.array([gain for _, gain in query_gains])
    figure, (axes,) = new_figure(5.0, 2.8)
    positions = np.arange(1, len(values) + 1)
    if len(values) <= 60:
        axes.bar(positions, values, color=np.where(values > 0, BLUE, ORANGE).tolist(), linewidth=0)
    else:  # two polygons, which look the same as one rectangle per query
        for colour, half in ((BLUE, np.maximum(values, 0)), (ORANGE, np.minimum(values, 0))):
            axes.fill_between(positions, half, step="mid", color=colour, linewidth=0)
    wins, losses = int((values > 0).sum()), int((values < 0).sum())
    axes.axhline(0, color="black", linewidth=0.6)
    mean = float(values.mean()) if len(values) else 0.0
    axes.axhline(mean, color=GREEN, linewidth=1.2, linestyle="--", label=f"mean {mean:+.4f}")
    axes.set_title(f"{title}: {wins} better, {losses} worse, {len(values) - wins - losses} the same", fontsize=10)
    axes.set_xlabel("queries, by gain")
    axes.set_ylabel(f"{measure} minus baseline's")
    axes.legend(fontsize=8, loc="upper right")
    return figure


def rank_changes(run: Run, baseline: Run, qrels: Qrels, relevance: int = 1) -> Counter[tuple[int, int]]:
    """Count relevant docs by (rank in the baseline, rank in the run); a doc must be in both runs.

    >>> rank_changes({"q": {"a": 3.0, "b": 2.0}}, {"q": {"a": 0.1, "b": 0.2}}, {"q": {"a": 1, "b": 0, "c": 2}})
    Counter({(2, 1): 1})
    """
    changes: Counter[tuple[int, int]] = Counter()
    for query_id, judged in qrels.items():
        relevant = [doc_id for doc_id, grade in judged.items() if grade >= relevance]
        if not relevant or query_id not in run or query_id not in baseline:
            continue
        before, after = (
            {doc_id: rank for rank, doc_id in enumerate(rank_docs(ranked[query_id]), 1)} for ranked in (baseline, run)
        )
        changes.update((before[doc_id], after[doc_id]) for doc_id in relevant if doc_id in before and doc_id in after)
    return changes


def draw_rank_changes(changes: Mapping[tuple[int, int], int], title: str) -> Figure:
    """Draw ranks in the baseline on the x axis and ranks in the run on the y axis, with rank 1 at the top.

    A relevant doc above the diagonal has a better rank in the run.
    """
    figure, (axes,) = new_figure(4.2, 4.0)
    deepest = max((rank for pair in changes for rank in pair), default=1)
    largest = max(changes.values(), default=1)
    axes.plot([1, deepest], [1, deepest], color="black", linewidth=0.6)
    directions = (
        ("moved up", BLUE, lambda b, a: a < b),
        ("moved down", ORANGE, lambda b, a: a > b),
        ("stayed", GREY, lambda b, a: a == b),
    )
    for name, colour, belongs in directions:
        part = {pair: count for pair, count in changes.items() if belongs(*pair)}
        befores, afters = ([pair[side] for pair in part] for side in (0, 1))
        areas = [12 + 300 * count / largest for count in part.values()]
        axes.scatter(
            befores, afters, s=areas, color=colour, alpha=0.55, linewidths=0, label=f"{name}: {sum(part.values())}"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.75, deepest * 1.3)
    axes.set_ylim(deepest * 1.3, 0.75)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= deepest]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("rank in the baseline")
    axes.set_ylabel("rank in the run")
    axes.set_title(title, fontsize=10)
    legend = axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([30])  # type: ignore[union-attr]
    return figure


def draw_by_length(rows: Sequence[Mapping[str, Any]], measure: str, title: str, label: str = "baseline") -> Figure:
    """Draw a measure by the length of relevant docs, with a bar for the run and a bar for the baseline.

    Args:
        rows: The result of `measures_by_length`.
        measure: One of their measures.
        title: Title.
        label: Name of the baseline.
    """
    figure, (axes,) = new_figure(5, 3)
    names = [name for name in ("baseline", "measures") if name in rows[0]]
    width, places = 0.8 / len(names), np.arange(len(rows))
    for number, name in enumerate(names):
        values = [row[name][measure] for row in rows]
        shift = (number - (len(names) - 1) / 2) * width
        is_run = name == "measures"
        axes.bar(places + shift, values, width, color=BLUE if is_run else GREY, label="run" if is_run else label)
    ends = [
        f"{row['words'][0]}+" if row["words"][1] is None else f"{row['words'][0]}-{row['words'][1] - 1}" for row in rows
    ]
    axes.set_xticks(places, [f"{end}\n{row['num_queries']} queries" for end, row in zip(ends, rows, strict=True)])
    axes.set_xlabel("words of relevant docs")
    axes.set_ylabel(measure)
    axes.set_title(title)
    axes.legend(frameon=False)
    return figure


def write_comparison(
    folder: Path, name: str, measure: str, run: Run, baseline: Run, qrels: Qrels, relevance: int = 1
) -> list[Path]:
    """Draw a set's `pictures/SET_gains.png` and `SET_ranks.png` from the files in `evaluation/SET/`."""
    lines = (folder / "evaluation" / name / "per_query.jsonl").read_text(encoding="utf-8").splitlines()
    query_gains = gains([json.loads(line) for line in lines], measure)
    changes = rank_changes(run, baseline, qrels, relevance)
    return [
        save(draw_gains(query_gains, measure, name), folder, f"{name}_gains"),
        save(draw_rank_changes(changes, f"{name}: relevant docs"), folder, f"{name}_ranks"),
    ]
