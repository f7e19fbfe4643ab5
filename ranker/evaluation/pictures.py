"""Pictures of a run, PNG files in `pictures/`: learning curves, gains per query, rank changes of relevant docs.

The functions that compute the numbers do not use matplotlib, so that tests can check the numbers. Only the drawing
functions import matplotlib.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.ranking import rank_docs
from ranker.files.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ranker.types import Qrels, Run

log = logging.getLogger(__name__)

Curves = dict[str, list[tuple[int, float]]]

# Okabe and Ito's colours, which colour-blind readers can distinguish
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"
MARGIN = 0.1  # around a picture, in inches
OTHERS = ("#56b4e9", "#e69f00", "#cc79a7", "#f0e442", "#000000")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write `pictures/NAME.png`; slashes in a set's name become underscores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = folder / "pictures" / f"{name.replace('/', '_')}.png"
    figure.set_dpi(200)
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).padded(MARGIN)
    with write_whole(path, binary=True) as file:
        figure.savefig(file, dpi=200, bbox_inches=box, format="png")  # with "tight", matplotlib would draw twice
    return path


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, share_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure in `STYLE`; sizes are in inches, and no window system is needed.

    Returns:
        The figure and its axes, row by row.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
        figure.subplots_adjust(hspace=0.12 if share_x else 0.45, wspace=0.35)
    return figure, list(grid.ravel())


# learning curves
# --------------------------------------------------------------------------------------------------------------------


def read_curves(*folders: Path) -> Curves:
    """Return the logged values of `metrics.csv`: name -> [(optimizer steps done, value)].

    Args:
        folders: The run folder; for a resumed run, first the folders of the earlier runs, oldest first.
    """
    curves: Curves = {}
    for part in folders:
        logged = _read_metrics(part / "metrics.csv")
        first = min((values[0][0] for values in logged.values()), default=0)
        for name in {*curves, *logged}:
            curves[name] = [point for point in curves.get(name, []) if point[0] < first] + logged.get(name, [])
    return {name: values for name, values in curves.items() if values}


def _read_metrics(path: Path) -> Curves:
    """Return the curves of one `metrics.csv`; empty if the file is missing or damaged; a damaged file is logged."""
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return _curves_of(csv.DictReader(lines, restkey="further columns"))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        log.warning("%s: expected a table with a column step, got %r; the picture lacks its curves", path, error)
        return {}


def _curves_of(rows: Iterable[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for row in rows:
        for name, text in row.items():
            if text and not name.startswith(("step", "epoch", "test/")):
                # steps are numbered from 0; a validation has the number of the previous step
                curves.setdefault(name, []).append((int(row["step"]) + 1, float(text)))
    return curves


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return, for each position, the mean of the `window` values that end there. The first positions use fewer values.

    >>> running_mean([4.0, 2.0, 6.0, 1.0], window=2)
    [4.0, 3.0, 4.0, 3.5]
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def draw_curves(curves: Curves, monitor: str | None, title: str) -> Figure | None:
    """Draw training loss (above) and validation measures (below) by optimizer step; None if nothing was logged."""
    measured = {name: points for name, points in curves.items() if name.startswith("val/")}
    loss = [(step, value) for step, value in curves.get("train/loss", []) if math.isfinite(value)]
    panels = [name for name, points in (("loss", loss), ("val", measured)) if points]
    if not panels:
        return None
    figure, grid = new_figure(5.0, 1.2 + 1.9 * len(panels), rows=len(panels), share_x=True)
    axes = dict(zip(panels, grid, strict=True))
    if loss:
        steps, values = zip(*loss, strict=True)
        window = max(1, len(values) // 20)
        if window > 1:
            axes["loss"].plot(steps, values, color=GREY, linewidth=0.7, alpha=0.7, label="as logged")
        name = f"mean of {window}" if window > 1 else "as logged"
        axes["loss"].plot(steps, running_mean(values, window), color=BLUE, linewidth=1.6, label=name)
        axes["loss"].set_ylabel("training loss")
        axes["loss"].legend(fontsize=8)
    monitored = str(monitor).rpartition("/")[2]  # the monitored measure, without the name of a set
    shown = sorted(measured, key=lambda name: (name != monitor, name.rpartition("/")[2] != monitored, name))
    for name, colour in zip(shown, (BLUE, *OTHERS), strict=False):
        steps, values = zip(*measured[name], strict=True)
        wide = 1.8 if name == monitor else 0.9
        axes["val"].plot(
            steps, values, color=colour, linewidth=wide, marker="o", markersize=3, label=name.removeprefix("val/")
        )
        if name == monitor:
            best = int(np.argmax(values))
            axes["val"].plot(steps[best], values[best], marker="*", markersize=11, color=ORANGE, linestyle="none",
                             label=f"best: {values[best]:.4f} at {steps[best]}")  # fmt: skip
    if measured:
        axes["val"].set_ylabel("validation")
        axes["val"].legend(fontsize=8, loc="best")
    grid[-1].set_xlabel("optimizer steps")
    grid[0].set_title(title, fontsize=10)
    return figure


# against the baseline
# ---------------------------------------------------------------------------------------------------------------


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


# a run's pictures
# -------------------------------------------------------------------------------------------------------------------


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


def write_curves(folders: Sequence[Path], monitor: str | None, title: str) -> Path | None:
    """Draw the learning curves of `read_curves` into the last folder's `pictures/learning_curves.png`.

    Returns:
        The file; None if nothing was logged.
    """
    figure = draw_curves(read_curves(*folders), monitor, title)
    return None if figure is None else save(figure, folders[-1], "learning_curves")


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
