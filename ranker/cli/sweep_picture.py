"""The picture of a sweep: a panel with the objective of each job, and for each swept key a panel with the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranker.evaluation.figures import BLUE, GREEN, GREY, ORANGE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["axis_positions", "best_so_far", "draw_sweep", "save"]

STATUS_MARKERS = {
    "ok": ("o", BLUE, "finished"),
    "pruned": ("v", GREY, "pruned"),
    "failed": ("x", ORANGE, "failed"),
    "killed": ("+", ORANGE, "killed"),
}


def best_so_far(rows: Sequence[Mapping[str, Any]], maximize: bool = True) -> list[tuple[int, float]]:
    """Return a pair (job, best objective among the finished jobs up to this one) for each job.

    >>> jobs = [(0, "ok", 0.5), (1, "failed", None), (2, "pruned", 0.9), (3, "ok", 0.4)]
    >>> best_so_far([{"job": job, "status": status, "objective": value} for job, status, value in jobs])
    [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)]
    """
    best, curve = None, []
    for row in rows:
        value = row["objective"]
        if row["status"] == "ok" and value is not None:
            best = value if best is None else max(best, value) if maximize else min(best, value)
        if best is not None:
            curve.append((row["job"], best))
    return curve


def axis_positions(values: Sequence[str | None]) -> tuple[list[float], list[str] | None, bool]:
    """Return the positions of a key's values on an axis.

    Returns:
        The positions, the labels of positions 0, 1, ... (None if all values are numbers), and whether the scale is
        logarithmic.

    >>> axis_positions(["1e-4", "1e-2", "1e-3"])
    ([0.0001, 0.01, 0.001], None, True)
    >>> axis_positions(["lce", "kl", "lce"])
    ([1.0, 0.0, 1.0], ['kl', 'lce'], False)
    """
    try:
        numbers = [float(str(value)) for value in values]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        names = sorted({"default" if value is None else value for value in values})
        return [float(names.index("default" if value is None else value)) for value in values], names, False
    return numbers, None, min(numbers) > 0 and max(numbers) / min(numbers) >= 10


def draw_sweep(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[str | None]], maximize: bool = True
) -> Figure:
    """Draw one panel with the objective of each job and the best so far, then one panel per swept key.

    Args:
        rows: The jobs.
        columns: Swept key -> its value in each job.
        maximize: Whether a higher objective is better.
    """
    num_columns = min(3, 1 + len(columns))
    num_rows = -(-(1 + len(columns)) // num_columns)
    figure, panels = new_figure(3.6 * num_columns, 3.0 * num_rows, rows=num_rows, columns=num_columns)
    _draw_jobs(panels[0], rows, [row["job"] for row in rows])
    curve = best_so_far(rows, maximize)
    if curve:
        jobs, values = zip(*curve, strict=True)
        panels[0].step(jobs, values, where="post", color=GREEN, linewidth=1.2, label="best so far")
    panels[0].set_xlabel("job")
    panels[0].xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    for (key, column), axes in zip(columns.items(), panels[1:], strict=False):
        positions, names, logarithmic = axis_positions(column)
        _draw_jobs(axes, rows, positions)
        low, high = min(positions), max(positions)  # matplotlib ignores marks on the lower edge when it sets the limits
        if names is not None:
            axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) < 9 else 30, ha="center")
            axes.set_xlim(-0.5, len(names) - 0.5)
        elif logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.5, high * 1.5)
        elif high > low:
            axes.set_xlim(low - 0.08 * (high - low), high + 0.08 * (high - low))
        axes.set_xlabel(key)
    for axes in panels[: 1 + len(columns) : num_columns]:
        axes.set_ylabel("objective")
    for unused in panels[1 + len(columns) :]:
        unused.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.90), ncols=4, fontsize=8, frameon=False)
    return figure


def _draw_jobs(axes: Axes, rows: Sequence[Mapping[str, Any]], positions: Sequence[float]) -> None:
    """Draw one mark per job; jobs without an objective are drawn on the lower edge."""
    for status, (marker, colour, name) in STATUS_MARKERS.items():
        points = [(x, row["objective"]) for x, row in zip(positions, rows, strict=True) if row["status"] == status]
        with_objective = [(x, value) for x, value in points if value is not None]
        if with_objective:
            axes.scatter(
                [x for x, _ in with_objective],
                [value for _, value in with_objective],
                marker=marker,
                color=colour,
                s=28,
                label=name,
                zorder=3,
            )
        without_objective = [x for x, value in points if value is None]
        if without_objective:
            axes.scatter(
                without_objective,
                [0.02] * len(without_objective),
                marker=marker,
                color=colour,
                s=28,
                transform=axes.get_xaxis_transform(),
                label=None if with_objective else name,
                zorder=3,
            )
