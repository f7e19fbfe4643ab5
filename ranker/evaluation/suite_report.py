"""The table and the picture of a suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.evaluation import figures
from ranker.evaluation.significance import p_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


def rows_of(content: Mapping[str, Any], measure: str) -> list[list[str]]:
    """Return the cells of the table: a row for each set, then a row for the macro mean.

    The columns are set, queries, first stage, baseline (if any set has one), run, delta, p, oracle, worse, and
    wins/losses/ties.

    Args:
        content: What `ranker.evaluation.suite.summarise` returned.
        measure: The measure to show.
    """
    with_baseline = any("baseline" in entry for entry in content["sets"].values())
    rows = []
    for name, entry in content["sets"].items():
        compared = entry.get("comparison", {}).get(measure)
        counts = f"{compared['wins']}/{compared['losses']}/{compared['ties']}" if compared else "-"
        rows.append(
            [
                name,
                str(entry["queries"]),
                _mean(entry, "first_stage", measure),
                *([_mean(entry, "baseline", measure)] if with_baseline else []),
                _mean(entry, "run", measure),
                f"{compared['delta']:+.4f}" if compared else "-",
                p_text(compared["p_value"]) if compared else "-",
                _mean(entry, "oracle", measure),
                f"{100 * entry['worse'][measure]:.0f} %" if "worse" in entry else "-",
                counts,
            ]
        )
    means = {kind: {measure: part[measure]["mean"]} for kind, part in content["macro"].items()}
    queries = str(sum(entry["queries"] for entry in content["sets"].values()))
    shown = [_mean(means, "first_stage", measure), *([_mean(means, "baseline", measure)] if with_baseline else [])]
    shown += [_mean(means, "run", measure), f"{means['delta'][measure]:+.4f}" if "delta" in means else "-", ""]
    rows.append(["macro mean", queries, *shown, _mean(means, "oracle", measure), "", ""])
    return rows


def _mean(entry: Mapping[str, Any], kind: str, measure: str) -> str:
    return f"{entry[kind][measure]:.4f}" if kind in entry else "-"


def print_suite(content: Mapping[str, Any], measure: str, console: Console | None = None) -> None:
    """Print the table of a suite, and below it the sets that are left out and the warnings.

    Args:
        content: The content of `suite.json`.
        measure: The measure to show.
        console: The console; None is the screen.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    title = Text(f"{content['suite']}: {measure}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    rows = rows_of(content, measure)
    headings = ["set", "queries", "first\nstage", "run", "delta", "p", "oracle", "worse", "wins/\nlosses/\nties"]
    if len(rows[0]) > len(headings):
        headings.insert(3, "base-\nline")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), end_section=number == len(rows) - 2)
    console.print(table)
    for kind, name in (("run", "macro mean"), ("delta", "its delta")):
        if kind in content["macro"]:
            part = content["macro"][kind][measure]
            low, high = part["interval"]
            console.print(Text(f"{name}: {part['mean']:.4f}, 95 % of bootstrap samples {low:.4f} to {high:.4f}"))
    console.print(
        Text(
            "delta, p, wins: against the baseline, or the first stage without one; worse: share of the queries below "
            "the first stage; oracle: the candidates ordered by their grades",
            "dim",
        )
    )
    for name, folder in content["left_out"].items():
        console.print(Text(f"left out: {name}, no folder {folder}", "yellow"))
    for warning in content["warnings"]:
        console.print(Text(f"warning: {warning}", "yellow"))


def draw(content: Mapping[str, Any], measure: str) -> Figure:
    """Draw a line for each set, with points for first stage, baseline, run and oracle, and one for the macro mean."""
    sets = content["sets"]
    figure, (axes,) = figures.new_figure(5.6, 1.4 + 0.3 * (len(sets) + 1))
    means = {kind: {measure: part[measure]["mean"]} for kind, part in content["macro"].items() if kind != "delta"}
    entries = [*sets.values(), means]
    places = np.arange(len(entries))[::-1]
    styles = {
        "oracle": ("|", figures.GREY, "oracle of the candidates"),
        "first_stage": ("o", figures.GREY, "first stage"),
        "baseline": ("s", figures.ORANGE, "baseline"),
        "run": ("o", figures.BLUE, "run"),
    }
    for place, entry in zip(places, entries, strict=True):
        if "first_stage" in entry:
            ends = [entry["first_stage"][measure], entry["run"][measure]]
            axes.plot(ends, [place, place], color=figures.GREY, linewidth=1.2, zorder=1)
    for kind, (marker, colour, label) in styles.items():
        points = [(entry[kind][measure], place) for place, entry in zip(places, entries, strict=True) if kind in entry]
        if points:
            values, rows = zip(*points, strict=True)
            axes.scatter(values, rows, marker=marker, color=colour, s=36, label=label, zorder=2)
    low, high = content["macro"]["run"][measure]["interval"]
    axes.plot([low, high], [places[-1] - 0.22] * 2, color=figures.BLUE, linewidth=1.6, label="95 % of samples")
    axes.axhline(0.5, color="black", linewidth=0.6)
    axes.set_yticks(places, [*sets, "macro mean"])
    axes.set_ylim(-0.6, len(entries) - 0.4)
    axes.set_xlim(0, 1)
    axes.set_xlabel(measure)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.9 / (1.4 + 0.3 * len(entries))), ncols=3)
    return figure


def write_picture(folder: Path, content: Mapping[str, Any], measure: str) -> Path:
    """Draw a suite's `pictures/suite.png`."""
    return figures.save(draw(content, measure), folder, "suite")
