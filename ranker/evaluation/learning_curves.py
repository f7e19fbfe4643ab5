"""The learning curves of a run: read from `metrics.csv`, drawn into `pictures/learning_curves.png`."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.evaluation.figures import BLUE, GREY, ORANGE, OTHERS, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Curves = dict[str, list[tuple[int, float]]]


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


def write_curves(folders: Sequence[Path], monitor: str | None, title: str) -> Path | None:
    """Draw the learning curves of `read_curves` into the last folder's `pictures/learning_curves.png`.

    Returns:
        The file; None if nothing was logged.
    """
    figure = draw_curves(read_curves(*folders), monitor, title)
    return None if figure is None else save(figure, folders[-1], "learning_curves")
