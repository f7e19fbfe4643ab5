"""The style and the colours of pictures, an empty figure, and the PNG file of a figure in `pictures/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranker.files.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"
MARGIN = 0.1  # around a picture, in inches
DPI = 200  # dots per inch
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
    figure.set_dpi(DPI)
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).padded(MARGIN)
    with write_whole(path, binary=True) as file:
        figure.savefig(file, dpi=DPI, bbox_inches=box, format="png")  # with "tight", matplotlib would draw twice
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
