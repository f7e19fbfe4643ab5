"""The report of a study: Markdown with pictures and tables, and the same for a dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ranker.files import write_whole
from ranker.probing import pictures
from ranker.probing.results import Results
from ranker.probing.summary import Comparison, TaskSummary, compare, selectivity, summarise

SEVERAL_LAYERS = ("shuffled", "random_encoder")  # controls that are probed at more than one layer


def write_report(folder: Path, results: Results, warnings: Sequence[str], notes: Sequence[str] = ()) -> dict[str, Path]:
    """Write the pictures and `report.md`.

    Args:
        folder: The run folder.
        results: All results; with two subjects, the second is compared with the first.
        warnings: What a reader should know before the numbers.
        notes: Lines on how the run was made.

    Returns:
        The PNGs by name.
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
        lines += _picture("heat map, each task by its own range", f"heat_by_row_{models.index(model)}", shown)
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
        title = f"{model}: compression, shape of each task (red: best, and tied with it)"
        figures[f"heat_by_row_{number}"] = pictures.heat_map(values, title, by_row=True, boxed=tied)
        selective = {task: found for task in tasks if (found := selectivity(results, model, task))}
        if selective:
            figures[f"selectivity_{number}"] = pictures.heat_map(
                selective, f"{model}: selectivity", signed=True, label="accuracy above the control task's"
            )
        figures[f"online_{number}"] = pictures.online_curves(results, model)
    if len(models) > 1:
        compared = {task: compare(results, models[0], models[1], task) for task in tasks}
        figures["difference"] = pictures.heat_map(
            {task: own.compression for task, own in compared.items()},
            f"{models[1]} minus {models[0]} (grey: could be chance)",
            signed=True,
            tied={task: {layer: own.tied(layer) for layer in own.bits} for task, own in compared.items()},
            label="difference in compression",
        )
    return {name: pictures.save(figure, folder, name) for name, figure in figures.items()}


def _picture(title: str, name: str, shown: dict[str, Path]) -> list[str]:
    return [f"![{title}](pictures/{name}.png)", ""] if name in shown else []


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
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
        own = record.description
        counts = own["class_counts"]["train"]
        largest = max(counts) / max(1, sum(counts))
        rows.append(
            [
                name,
                own["labeller"],
                "/".join(str(own["pairs"][part]) for part in ("train", "val", "test")),
                sum(counts),
                len(own["classes"]),
                f"{largest:.0%}",
                len(set(record.queries.tolist())),
                own["cut_targets"],
                own["data_hash"][:8],
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
    found = {task: summarise(results, model, task) for task in results.tasks}
    head = [
        "task",
        "best layer",
        "compression",
        "+-",
        "tied with it",
        "detectable (bits/target)",
        "centre of gravity",
        "expected layer",
        "last-layer drop",
        "accuracy",
        "macro F1",
        "selectivity",
        "control/task length",
    ]
    lines = table(head, (_summary_row(task, own) for task, own in found.items()))
    ranked = {task: own.measures for task, own in found.items() if own.measures}
    if ranked:
        names = list(dict.fromkeys(name for own in ranked.values() for name in own))
        lines += ["", "Ranking the test queries' docs by the probe at the best layer:", ""]
        lines += table(
            ["task", *names], ([task, *(own.get(name, math.nan) for name in names)] for task, own in ranked.items())
        )
    return lines


def _summary_row(task: str, own: TaskSummary) -> list[Any]:
    tied = ", ".join(str(layer) for layer in own.tied if layer != own.best) or "none"
    return [
        task,
        own.best,
        own.compression,
        own.compression_error,
        tied,
        own.detectable,
        own.gravity,
        own.expected,
        f"{own.drop:.0%}",
        own.accuracy,
        own.macro_f1,
        own.selectivity,
        own.control_ratio,
    ]


def _comparison_table(results: Results) -> list[str]:
    first, second = results.models[:2]
    rows: list[list[Any]] = []
    for task in results.tasks:
        own: Comparison = compare(results, first, second, task)
        for layer, difference in own.bits.items():
            rows.append(
                [
                    task,
                    layer,
                    f"{own.compression[layer]:+.3f}",
                    f"{difference.mean:+.4f}",
                    f"{difference.low:+.4f} to {difference.high:+.4f}",
                    f"{difference.detectable:.4f}",
                    f"{own.p_holm[layer]:.3f}",
                    "tied" if own.tied(layer) else "",
                ]
            )
    head = ["task", "layer", "compression", "bits/target", "95% over queries", "detectable", "p (Holm)", ""]
    return [
        "Second minus first; fewer bits are better, so a negative number of bits is a gain.",
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
            # counting few labels can cost more than the uniform code, from which every probe starts
            leak = controls["shuffled"] - (prior if math.isnan(prior) else max(1.0, prior))
            rows.append([task, model, best, *controls.values(), f"{leak:+.3f}" if not math.isnan(leak) else ""])
    names = [
        f"{label}, its best layer" if name in SEVERAL_LAYERS else label for name, (label, _) in pictures.BANDS.items()
    ]
    return table(["task", "subject", "best layer", *names, "shuffled minus prior or 1"], rows)


def _reading(results: Results) -> list[str]:
    few = [task for task, record in results.tasks.items() if len(set(record.queries.tolist())) < 100]
    lines = [
        "Compression is the uniform code's length over the code's length: 1 tells nothing more than the number of classes. What has to be "
        "beaten is the label prior, and for a claim about the encoder the random encoder and the surface features. Shuffled labels above "
        "the prior (or above 1, where the prior costs more than the uniform code) would be a leak. Errors are clustered by query; "
        "`detectable` is the least difference that a test at 5% finds in 80% of cases, and layers within it of the best one are called tied.",
    ]
    if few:
        lines += [
            "",
            f"Fewer than 100 training queries: {', '.join(few)}. Differences of the size seen between layers may be chance there.",
        ]
    return lines


def log_to_wandb(logger: Any, results: Results, shown: dict[str, Path]) -> None:
    """Put the pictures and the table into a Weights & Biases run.

    Args:
        logger: Lightning's WandbLogger.
        results: All results.
        shown: PNGs by name.
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
            own = summarise(results, model, task)
            best |= {
                f"probe/{model}/{task}/best_layer": float(own.best),
                f"probe/{model}/{task}/compression": own.compression,
            }
    logger.log_metrics(best)
    logger.experiment.finish()
