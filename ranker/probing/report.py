"""Write the report of a study: `report.md` with pictures and tables, and the same content to Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ranker.files.writing import write_whole
from ranker.probing import pictures
from ranker.probing.results import Results
from ranker.probing.summary import Comparison, TaskSummary, compare, selectivity, summarise

SEVERAL_LAYERS = ("shuffled", "random_encoder")  # controls that have results at several layers


def write_report(folder: Path, results: Results, warnings: Sequence[str], notes: Sequence[str] = ()) -> dict[str, Path]:
    """Write the pictures and `report.md`.

    Args:
        folder: The run folder.
        results: All results. If there are two subjects, the second is compared with the first.
        warnings: Caveats, printed before the numbers.
        notes: Lines about the options of the run.

    Returns:
        name -> path of the PNG
    """
    models = results.models
    shown = _draw(folder, results)
    lines = ["# Probing report", "", *(f"- {note}" for note in notes), f"- compression in units: {results.units}", ""]
    if warnings:
        lines += ["## Read this first", "", *(f"- {warning}" for warning in warnings), ""]
    lines += ["## Data", "", *_data_table(results), ""]
    for model in models:
        lines += [f"## {model}", "", *_summary_table(results, model), ""]
        lines += _picture("heat map, absolute", f"heat_{models.index(model)}", shown)
        lines += _picture("heat map, colours scaled per task", f"heat_by_row_{models.index(model)}", shown)
        lines += _picture("selectivity", f"selectivity_{models.index(model)}", shown)
        lines += _picture("online code", f"online_{models.index(model)}", shown)
    if len(models) > 1:
        lines += [f"## {models[1]} against {models[0]}", "", *_comparison_table(results), ""]
        lines += _picture("difference, ties grey", "difference", shown)
    lines += ["## Against the controls", ""]
    lines += _picture("compression by layer with control bands", "lines", shown)
    lines += [*_control_table(results), "", *_reading(results), ""]
    with write_whole(folder / "report.md") as file:
        file.write("\n".join(lines))
    return shown


def _draw(folder: Path, results: Results) -> dict[str, Path]:
    models, tasks = results.models, list(results.tasks)
    figures: dict[str, Any] = {"lines": pictures.compression_lines(results)}
    for number, model in enumerate(models):
        values = {task: results.compression(model, task) for task in tasks}
        figures[f"heat_{number}"] = pictures.heat_map(values, f"{model}: compression")
        tied = {task: summarise(results, model, task).tied for task in tasks}
        title = f"{model}: compression, colours scaled per task (red: best layer and those tied with it)"
        figures[f"heat_by_row_{number}"] = pictures.heat_map(values, title, by_row=True, boxed=tied)
        selective = {task: by_layer for task in tasks if (by_layer := selectivity(results, model, task))}
        if selective:
            figures[f"selectivity_{number}"] = pictures.heat_map(
                selective, f"{model}: selectivity", signed=True, label="accuracy minus the control task's"
            )
        figures[f"online_{number}"] = pictures.online_curves(results, model)
    if len(models) > 1:
        compared = {task: compare(results, models[0], models[1], task) for task in tasks}
        figures["difference"] = pictures.heat_map(
            {task: comparison.compression for task, comparison in compared.items()},
            f"{models[1]} minus {models[0]} (grey: could be chance)",
            signed=True,
            tied={
                task: {layer: comparison.tied(layer) for layer in comparison.bits}
                for task, comparison in compared.items()
            },
            label="difference in compression",
        )
    return {name: pictures.save(figure, folder, name) for name, figure in figures.items()}


def _picture(title: str, name: str, shown: dict[str, Path]) -> list[str]:
    return [f"![{title}](pictures/{name}.png)", ""] if name in shown else []


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
    ]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}"
    return str(value).replace("|", "\\|")


def _data_table(results: Results) -> list[str]:
    rows = []
    for name, record in results.tasks.items():
        data = record.description
        counts = data["class_counts"]["train"]
        largest = max(counts) / max(1, sum(counts))
        rows.append(
            [
                name,
                data["labeller"],
                "/".join(str(data["pairs"][part]) for part in ("train", "val", "test")),
                sum(counts),
                len(data["classes"]),
                f"{largest:.0%}",
                len(set(record.queries.tolist())),
                data["cut_targets"],
                data["data_hash"][:8],
            ]
        )
    head = [
        "task",
        "labels by",
        "pairs train/val/test",
        "training targets",
        "k",
        "largest class",
        "training queries",
        "cut off",
        "data hash",
    ]
    return table(head, rows)


def _summary_table(results: Results, model: str) -> list[str]:
    summaries = {task: summarise(results, model, task) for task in results.tasks}
    head = [
        "task",
        "best layer",
        "compression",
        "+-",
        "layers tied with it",
        "detectable (bits/target)",
        "centre of gravity",
        "expected layer",
        "last-layer drop",
        "accuracy",
        "macro F1",
        "selectivity",
        "control/task length",
    ]
    lines = table(head, (_summary_row(task, summary) for task, summary in summaries.items()))
    ranked = {task: summary.measures for task, summary in summaries.items() if summary.measures}
    if ranked:
        names = list(dict.fromkeys(name for measures in ranked.values() for name in measures))
        lines += ["", "Ranking the test queries' docs by the probe at the best layer:", ""]
        rows = ([task, *(measures.get(name, math.nan) for name in names)] for task, measures in ranked.items())
        lines += table(["task", *names], rows)
    return lines


def _summary_row(task: str, summary: TaskSummary) -> list[Any]:
    tied = ", ".join(str(layer) for layer in summary.tied if layer != summary.best) or "none"
    return [
        task,
        summary.best,
        summary.compression,
        summary.compression_error,
        tied,
        summary.detectable,
        summary.gravity,
        summary.expected,
        f"{summary.drop:.0%}",
        summary.accuracy,
        summary.macro_f1,
        summary.selectivity,
        summary.control_ratio,
    ]


def _comparison_table(results: Results) -> list[str]:
    first, second = results.models[:2]
    rows: list[list[Any]] = []
    for task in results.tasks:
        comparison: Comparison = compare(results, first, second, task)
        for layer, difference in comparison.bits.items():
            rows.append(
                [
                    task,
                    layer,
                    f"{comparison.compression[layer]:+.3f}",
                    f"{difference.mean:+.4f}",
                    f"{difference.low:+.4f} to {difference.high:+.4f}",
                    f"{difference.detectable:.4f}",
                    f"{comparison.p_holm[layer]:.3f}",
                    "tied" if comparison.tied(layer) else "",
                ]
            )
    head = ["task", "layer", "compression", "bits/target", "95% over queries", "detectable", "p (Holm)", ""]
    return [
        "Second minus first. Fewer bits are better, so a negative number of bits is a gain.",
        "",
        *table(head, rows),
    ]


def _control_table(results: Results) -> list[str]:
    rows: list[list[Any]] = []
    for task in results.tasks:
        for model in results.models:
            best = max(results.compression(model, task).values())
            controls = {name: results.value(model, task, name) for name in pictures.BANDS}
            prior = controls["label_prior"]
            # every probe starts with the uniform code; with few labels, the code of the label prior can be longer
            leak = controls["shuffled"] - (prior if math.isnan(prior) else max(1.0, prior))
            rows.append([task, model, best, *controls.values(), f"{leak:+.3f}" if not math.isnan(leak) else ""])
    names = [
        f"{label}, its best layer" if name in SEVERAL_LAYERS else label for name, (label, _) in pictures.BANDS.items()
    ]
    return table(["task", "subject", "best layer", *names, "shuffled minus max(prior, 1)"], rows)


def _reading(results: Results) -> list[str]:
    few = [task for task, record in results.tasks.items() if len(set(record.queries.tolist())) < 100]
    lines = [
        "Compression is the length of the uniform code over the length of the code: at 1, the probe knows no more than "
        "the number of classes. A result must beat the label prior; a claim about the encoder must also beat the "
        "random encoder and the surface features. Shuffled labels above the prior (or above 1, if the prior's code is "
        "longer than the uniform code) would show a leak. Errors are clustered by query. `detectable` is the least "
        "difference that a test at 5% finds in 80% of cases; a layer is tied with the best one if they differ by no "
        "more than that.",
    ]
    if few:
        lines += [
            "",
            f"Fewer than 100 training queries: {', '.join(few)}. There, differences between layers may be chance.",
        ]
    return lines


def log_to_wandb(logger: Any, results: Results, shown: dict[str, Path]) -> None:
    """Log the pictures, the table and the best layers to a Weights & Biases run, and finish the run.

    Args:
        logger: Lightning's WandbLogger.
        results: All results.
        shown: name -> path of the PNG
    """
    for name, path in shown.items():
        logger.log_image(key=f"probe/{name}", images=[str(path)])
    rows = [result.row(results.units) for result in results.all]
    logger.log_table(
        key="probe/results", columns=list(rows[0]), data=[[str(value) for value in row.values()] for row in rows]
    )
    best: dict[str, float] = {}
    for model in results.models:
        for task in results.tasks:
            summary = summarise(results, model, task)
            best |= {
                f"probe/{model}/{task}/best_layer": float(summary.best),
                f"probe/{model}/{task}/compression": summary.compression,
            }
    logger.log_metrics(best)
    logger.experiment.finish()
