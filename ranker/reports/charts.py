"""Charts as SVG text with a description for screen readers; the style sheet of the page has the colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ranker.evaluation.learning_curves import running_mean

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 40
MAX_POINTS = 300  # largest number of points of a line; a line with more points is averaged over equal parts
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart with its title.

    Args:
        title: The title.
        svg: The drawing; empty if there is nothing to draw.
        legend: Names of the lines, in the order of their colours.
    """

    title: str
    svg: str
    legend: tuple[str, ...] = ()


class _Axes:
    """Linear axes of a chart, with about five round ticks each.

    Args:
        x: Range of the x values.
        y: Range of the y values.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = _widened(*x), _widened(*y)

    def at(self, x: float, y: float) -> str:
        """Return the position of a point as `X,Y`."""
        across = LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)
        down = TOP + (self.y[1] - y) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    def frame(self, x_label: str, y_label: str) -> str:
        """Return grid lines, tick labels and axis labels."""
        parts = []
        for value in ticks(*self.y):
            down = self.at(self.x[0], value).split(",")[1]
            parts.append(f'<path class="grid" d="M{LEFT},{down}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{down}" dy="4" text-anchor="end">{short(value)}</text>')
        for value in ticks(*self.x):
            across = self.at(value, self.y[0]).split(",")[0]
            parts.append(
                f'<text class="tick" x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(value)}</text>'
            )
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
            f'<text class="label" transform="translate(12,{middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>"
        )
        return "".join(parts)


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float) -> list[float]:
    """Return the positions of about five ticks between two numbers, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0), ticks(3, 27)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [5.0, 10.0, 15.0, 20.0, 25.0])
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """Return a tick's number in few characters.

    >>> short(0.30000000000000004), short(2000.0), short(2_500_000)
    ('0.3', '2000', '2.5M')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.6g}"


def _chart(title: str, description: str, body: str, legend: Sequence[str] = ()) -> Chart:
    label = escape(f"{title}: {description}")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg>'
    return Chart(title, svg, tuple(legend))


def thinned(points: Points, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return a line with at most `most` points.

    A longer line is cut into equal parts, except its last point. The means of the parts and the last point remain.

    >>> thinned([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0), (5, 0.0)], most=3)
    [(1.5, 2.0), (3.5, 6.0), (5.0, 0.0)]
    """
    if len(points) <= most:
        return [(float(x), float(y)) for x, y in points]
    *body, last = points
    means = (part.mean(axis=0) for part in np.array_split(np.array(body, float), most - 1))
    return [(float(x), float(y)) for x, y in means] + [(float(last[0]), float(last[1]))]


def lines(title: str, y_label: str, series: Mapping[str, Points], best: tuple[float, float] | None = None) -> Chart:
    """Draw lines over optimizer steps.

    Args:
        title: The title, for screen readers.
        y_label: Label of the y axis.
        series: Name -> points of a line. Colours repeat after seven lines. A line whose name begins with `raw ` is thin
            and grey.
        best: A point to mark with a ring.

    Returns:
        The chart, which has no drawing if no point is finite.
    """
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    finite = {name: thinned(points) for name, points in finite.items() if points}
    if not finite:
        return Chart(title, "")
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    axes = _Axes((min(0.0, *xs), max(xs)), (min(ys), max(ys)))
    body, number = axes.frame("optimizer steps", y_label), 0
    for name, points in finite.items():
        style = "raw" if name.startswith("raw ") else f"c{number % 7}"
        number += style != "raw"
        path = "M" + "L".join(axes.at(x, y) for x, y in points)
        body += f'<path class="line {style}" d="{path}"/>'
        if len(points) <= 40 and style != "raw":
            dots = "".join(_circle(axes.at(x, y), 2.5, f"{name}: {y:.4f} at {x:g}") for x, y in points)
            body += f'<g class="dots {style}">{dots}</g>'
    if best is not None:
        body += f'<g class="best">{_circle(axes.at(*best), 6, f"best: {best[1]:.4f} at step {best[0]:g}")}</g>'
    last = "; ".join(f"{name} ends at {points[-1][1]:.4f}" for name, points in finite.items())
    return _chart(title, last, body, [name for name in finite if not name.startswith("raw ")])


def _circle(at: str, radius: float, title: str) -> str:
    x, y = at.split(",")
    return f'<circle cx="{x}" cy="{y}" r="{radius:.2g}"><title>{escape(title)}</title></circle>'


def gains(title: str, measure: str, differences: Sequence[float]) -> Chart:
    """Draw the differences of all queries, best first, with gains above and losses below the zero line."""
    values = np.sort(np.asarray(differences, float))[::-1]
    if not len(values):
        return Chart(title, "")
    bound = max(float(np.abs(values).max()), 1e-6)
    axes = _Axes((0, len(values)), (-bound, bound))
    body = axes.frame("queries, by difference", f"difference of {measure}")
    for style, half in (("gain", np.maximum(values, 0)), ("loss", np.minimum(values, 0))):
        steps = "".join(f"L{axes.at(i, y)}L{axes.at(i + 1, y)}" for i, y in _steps(half))
        body += f'<path class="{style}" d="M{axes.at(0, 0)}{steps}L{axes.at(len(values), 0)}Z"/>'
    better, worse = int((values > 1e-12).sum()), int((values < -1e-12).sum())
    text = f"{better} better, {worse} worse, {len(values) - better - worse} the same; mean {values.mean():+.4f}"
    return _chart(title, text, f'{body}<path class="zero" d="M{axes.at(0, 0)}L{axes.at(len(values), 0)}"/>')


def _steps(values: np.ndarray) -> list[tuple[int, float]]:
    """Return the steps of the drawing as (position, height); for many queries, at a sample of positions."""
    chosen = range(len(values)) if len(values) <= 1000 else np.linspace(0, len(values) - 1, 1000).astype(int).tolist()
    return [(i, float(values[i])) for i in chosen]


def scatter(title: str, labels: tuple[str, str], pairs: Sequence[tuple[float, float]]) -> Chart:
    """Draw a circle for each query's pair of values; queries that coincide (to 0.01) share a larger circle.

    Args:
        title: The title, for screen readers.
        labels: Labels of the x axis and the y axis.
        pairs: The two values of each query.
    """
    if not pairs:
        return Chart(title, "")
    rounded: dict[tuple[float, float], int] = {}
    for x, y in pairs:
        key = (round(x, 2), round(y, 2))
        rounded[key] = rounded.get(key, 0) + 1
    high = max(1.0, *(value for pair in pairs for value in pair))
    low = min(0.0, *(value for pair in pairs for value in pair))
    axes = _Axes((low, high), (low, high))
    most = max(rounded.values())
    groups: dict[str, str] = {"loss": "", "same": "", "gain": ""}
    for (x, y), number in sorted(rounded.items(), key=lambda entry: -entry[1]):
        style = "gain" if y > x else "loss" if y < x else "same"
        queries = "1 query" if number == 1 else f"{number} queries"
        groups[style] += _circle(
            axes.at(x, y), 2.5 + 9 * math.sqrt(number / most) * (most > 1), f"{queries}: {x:.2f}, {y:.2f}"
        )
    body = axes.frame(*labels) + f'<path class="zero" d="M{axes.at(low, low)}L{axes.at(high, high)}"/>'
    body += "".join(f'<g class="points {style}">{circles}</g>' for style, circles in groups.items())
    above = sum(y > x for x, y in pairs)
    below = sum(y < x for x, y in pairs)
    return _chart(title, f"{above} queries above the diagonal, {below} below, {len(pairs) - above - below} on it", body)


def training(curves: Mapping[str, Points], monitor: str | None) -> list[Chart]:
    """Draw the curves of a training: the loss and the validation measures.

    Args:
        curves: The result of `ranker.evaluation.learning_curves.read_curves`.
        monitor: Name of the monitored value, whose best point is marked.
    """
    charts = []
    loss = [(step, value) for step, value in curves.get("train/loss", ()) if math.isfinite(value)]
    if loss:
        steps, values = zip(*loss, strict=True)
        window = max(1, len(values) // 20)
        smooth = list(zip(steps, running_mean(values, window), strict=True))
        name = f"mean of {window} logged values" if window > 1 else "as logged"
        series: dict[str, Points] = {"raw as logged": loss, name: smooth} if window > 1 else {name: loss}
        charts.append(lines("Training loss", "loss", series))
    shown = sorted((name for name in curves if name.startswith("val/")), key=lambda name: (name != monitor, name))
    if shown:
        series = {name.removeprefix("val/"): curves[name] for name in shown}
        finite = [point for point in curves.get(monitor or "", ()) if math.isfinite(point[1])]
        best = max(finite, key=lambda point: point[1]) if finite else None
        title = "Validation measures"
        if best is not None:
            title += f"; ring: best {str(monitor).removeprefix('val/')}, {best[1]:.4f} at step {best[0]}"
        charts.append(lines(title, "value", series, best))
    return [chart for chart in charts if chart.svg]
