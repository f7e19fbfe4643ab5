"""Table and plot of the results of `ranker sizes`: one model at several numbers of layers and vector sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranker.evaluation import figures
from ranker.files.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("set", "layers", "dim", "bytes_per_doc", "index_bytes", "docs_per_second", "query_ms")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a tab-separated table with a line for each set, number of layers and size; measures are the last columns.

    Args:
        path: The file.
        rows: A dict for each line, whose keys are `COLUMNS` and `measures`.
    """
    measures = list(rows[0]["measures"])
    with write_whole(path) as file:
        file.write("\t".join([*COLUMNS, *measures]) + "\n")
        for row in rows:
            values = [*(row[column] for column in COLUMNS), *(row["measures"][name] for name in measures)]
            file.write("\t".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values) + "\n")


def lines_of(
    rows: Sequence[Mapping[str, Any]], key: str, by: str, measure: str
) -> dict[int, list[tuple[float, float]]]:
    """Return the lines of a plot: value of the column `by` -> points (value of the column `key`, measure), ascending.

    Args:
        rows: As in `write_table`, of one set.
        key: The column of the horizontal axis.
        by: The column with one line per value.
        measure: The measure of the vertical axis.

    >>> rows = [{"dim": dim, "layers": 2, "measures": {"RR": dim / 10}} for dim in (8, 4)]
    >>> lines_of(rows, "dim", "layers", "RR")
    {2: [(4, 0.4), (8, 0.8)]}
    """
    lines: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row[by], []).append((row[key], row["measures"][measure]))
    return {value: sorted(lines[value]) for value in sorted(lines)}


def draw(rows: Sequence[Mapping[str, Any]], measure: str, title: str) -> Figure:
    """Draw a measure by the size of a doc's vector (a line per number of layers) and by time (a line per size).

    Args:
        rows: As in `write_table`, of one set.
        measure: The measure.
        title: The title.
    """
    figure, axes = figures.new_figure(9.0, 3.4, columns=2)
    panels = (
        ("bytes_per_doc", "layers", "bytes per doc", "layers"),
        ("docs_per_second", "dim", "docs encoded per second", "size"),
    )
    colours = (figures.BLUE, figures.ORANGE, figures.GREEN, *figures.OTHERS)
    for panel, (key, by, label, name) in zip(axes, panels, strict=True):
        for i, (value, points) in enumerate(lines_of(rows, key, by, measure).items()):
            across, up = zip(*points, strict=True)
            colour = colours[i % len(colours)]
            panel.plot(across, up, color=colour, marker="o", markersize=3, linewidth=1.4, label=f"{name} {value}")
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.set_ylabel(measure)
        panel.legend(fontsize=7)
    axes[0].set_title(title, fontsize=10)
    return figure
