"""Draw a study as PNG and SVG: heat maps of tasks and layers, compression with control bands, online codes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ranker.files.writing import write_whole
from ranker.probing.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

log = logging.getLogger(__name__)

BANDS = {  # control -> label and colour
    "label_prior": ("label prior", "#7f7f7f"),
    "shuffled": ("shuffled labels", "#bcbd22"),
    "surface": ("surface features", "#8c564b"),
    "random_embeddings": ("random embeddings", "#e377c2"),
    "random_encoder": ("random encoder", "#ff7f0e"),
}
MODEL_COLOURS = ("#1f77b4", "#d62728", "#2ca02c")


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write `pictures/NAME.png` and `pictures/NAME.svg` into a folder; return the path of the PNG."""
    from matplotlib import rc_context

    path = folder / "pictures" / f"{name}.png"
    if figure.get_layout_engine() is None:
        box = "tight"
    else:  # compute the layout once for both files, because with seven panels the layout takes most of the time
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        box = None
    # with the name as salt, equal pictures give equal files
    with rc_context({"svg.hashsalt": name}), write_whole(path.with_suffix(".svg"), binary=True) as file:
        figure.savefig(file, bbox_inches=box, format="svg", metadata={"Date": None})
    with write_whole(path, binary=True) as file:
        figure.savefig(file, dpi=150, bbox_inches=box, format="png")
    return path


def heat_map(
    values: Mapping[str, Mapping[int, float]],
    title: str,
    by_row: bool = False,
    signed: bool = False,
    tied: Mapping[str, Mapping[int, bool]] | None = None,
    boxed: Mapping[str, list[int]] | None = None,
    label: str = "compression",
) -> Figure:
    """Draw a heat map with a row for each task and a column for each layer; each cell shows its number.

    Args:
        values: task -> layer -> number
        title: Title.
        by_row: Whether the colours of each row are scaled to the row's own range; the numbers are not scaled.
        signed: Whether colours diverge from white at 0.
        tied: task -> layer -> whether the cell is grey, because its number could be due to chance.
        boxed: task -> layers whose cells get a red box.
        label: Label of the colour bar.
    """
    from matplotlib.figure import Figure

    tasks = list(values)
    layers = sorted({layer for by_layer in values.values() for layer in by_layer})
    grid = np.array([[values[task].get(layer, math.nan) for layer in layers] for task in tasks], dtype=float)
    shown = grid.copy()
    if by_row:
        low, high = np.nanmin(grid, axis=1, keepdims=True), np.nanmax(grid, axis=1, keepdims=True)
        shown = (grid - low) / np.where(high > low, high - low, 1.0)
    figure = Figure(figsize=(1.8 + 0.62 * len(layers), 1.3 + 0.45 * len(tasks)))
    axes: Axes = figure.subplots()
    limit = np.nanmax(np.abs(shown)) if np.isfinite(shown).any() else 1.0
    limits = (
        {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}
        if signed
        else {"vmin": np.nanmin(shown), "vmax": np.nanmax(shown), "cmap": "viridis"}
    )
    image = axes.imshow(shown, aspect="auto", **limits)  # type: ignore[arg-type]
    for row, task in enumerate(tasks):
        for column, layer in enumerate(layers):
            if not np.isfinite(grid[row, column]):
                continue
            is_tied = tied is not None and tied.get(task, {}).get(layer, False)
            if is_tied:
                axes.add_patch(_cell(column, row, facecolor="#dddddd", edgecolor="white"))
            if boxed is not None and layer in boxed.get(task, []):
                axes.add_patch(_cell(column, row, facecolor="none", edgecolor="red", linewidth=1.2))
            dark = not signed and shown[row, column] < (limits["vmin"] + limits["vmax"]) / 2  # type: ignore[operator]
            strong = signed and not is_tied and abs(shown[row, column]) > 0.6 * limit
            text = f"{grid[row, column]:+.2f}" if signed else f"{grid[row, column]:.2f}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark or strong else "#777777" if is_tied else "black",
            )
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="share of the task's range" if by_row else label)
    return figure


def _cell(column: int, row: int, **style: object) -> Patch:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, **style)  # type: ignore[arg-type]


def compression_lines(results: Results) -> Figure:
    """Draw a panel per task: compression by layer, with mean and range over seeds, and compression of the controls."""
    axes_of, figure = _panels(list(results.tasks))
    for task, axes in axes_of.items():
        for model, colour in zip(results.models, MODEL_COLOURS, strict=False):
            _line(axes, results, model, task, "none", model, colour, "-")
            if model == results.models[0] and results.of(model, task, "random_encoder"):
                _line(axes, results, model, task, "random_encoder", *BANDS["random_encoder"], "--")
        for control, (name, colour) in BANDS.items():
            controls = results.of(results.models[0], task, control)
            if controls and control != "random_encoder":
                values = [result.code.compression(results.units) for result in controls]
                axes.axhline(float(np.mean(values)), color=colour, linestyle=":", label=name)
                axes.axhspan(min(values), max(values), color=colour, alpha=0.15, linewidth=0)
        axes.set_title(task, fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        axes.set_xlabel("layer")
        axes.set_ylabel("compression")
    _legend(figure, axes_of)
    return figure


def _line(
    axes: Axes, results: Results, model: str, task: str, control: str, name: str, colour: str, style: str
) -> None:
    by_layer = results.by_layer(model, task, control)
    values = {layer: [result.code.compression(results.units) for result in seeds] for layer, seeds in by_layer.items()}
    layers = list(values)
    axes.plot(
        layers, [np.mean(values[layer]) for layer in layers], style, color=colour, marker="o", markersize=3, label=name
    )
    axes.fill_between(
        layers,
        [min(values[layer]) for layer in layers],
        [max(values[layer]) for layer in layers],
        color=colour,
        alpha=0.2,
    )


def online_curves(results: Results, model: str) -> Figure:
    """Draw a panel per task with a line per layer: a block's bits per target against the number of earlier targets."""
    from matplotlib import colormaps
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes_of, figure = _panels(list(results.tasks))
    deepest = max((result.layer or 0 for result in results.all), default=1) or 1
    for task, axes in axes_of.items():
        by_layer = results.by_layer(model, task)
        for layer, seeds in by_layer.items():
            curves = []
            for result in seeds:
                sizes = np.diff([0, *result.block_ends])
                curves.append(np.array(result.block_bits) / np.maximum(sizes, 1))
            sent_before = np.mean([[0, *result.block_ends[:-1]] for result in seeds], axis=0)
            # block 1 is left out, because it costs log2 k per target for every layer
            axes.plot(
                sent_before[1:],
                np.mean(curves, axis=0)[1:],
                color=colormaps["viridis"](layer / deepest),
                label=f"layer {layer}",
            )
        prior = results.of(model, task, "label_prior")
        if prior:
            ends = prior[0].block_ends
            axes.plot(
                ends[:-1],
                (np.array(prior[0].block_bits) / np.diff([0, *ends]))[1:],
                ":",
                color=BANDS["label_prior"][1],
                label="label prior",
            )
        uniform = math.log2(by_layer[0][0].code.classes) if 0 in by_layer else math.nan
        axes.axhline(uniform, color="black", linewidth=0.5)
        if any(len(result.block_ends) > 1 for seeds in by_layer.values() for result in seeds):
            axes.set_xscale("log")  # a log scale is impossible without a line
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("targets sent before")
        axes.set_ylabel("bits per target")
    figure.suptitle(f"{model}: what each block costs (black line: uniform code)", fontsize=10)
    _legend(figure, axes_of)
    return figure


def _panels(tasks: list[str]) -> tuple[dict[str, Axes], Figure]:
    from matplotlib.figure import Figure

    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in grid[len(tasks) :]:
        unused.set_visible(False)
    return dict(zip(tasks, grid, strict=False)), figure


def _legend(figure: Figure, axes_of: Mapping[str, Axes]) -> None:
    named = {
        label: handle
        for axes in axes_of.values()
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=8)
