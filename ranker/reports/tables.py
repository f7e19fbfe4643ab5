"""Make the tables of a page: measures with significance tests, and the overview of several sets. Cells are text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranker.evaluation.significance import p_text

TESTS = (
    "p: paired randomisation test over the judged queries, two-sided; p (t): paired t-test; p (Holm): the "
    "randomisation test, corrected over {family}."
)


def measures(metrics: Mapping[str, Any], run: str, baseline: str) -> dict[str, Any]:
    """Return the table of a `metrics.json`.

    Args:
        metrics: The content of the file.
        run: Label of the run.
        baseline: Label of the compared run.
    """
    comparison = metrics.get("comparison")
    table: dict[str, Any] = {"caption": "Measures", "head": ["measure", run], "rows": [], "note": ""}
    if comparison:
        table["head"] += [baseline, "difference", "p", "p (t)", "p (Holm)", "better / worse / same"]
        table["note"] = TESTS.format(family="the measures")
    for name, value in metrics["measures"].items():
        row = [name, f"{value:.4f}"]
        if comparison:
            entry = comparison[name]
            row += [f"{entry['baseline']:.4f}", f"{entry['delta']:+.4f}"]
            row += [p_text(entry[key]) for key in ("p_value", "p_value_t", "p_value_holm")]
            row += [f"{entry['wins']} / {entry['losses']} / {entry['ties']}"]
        table["rows"].append(row)
    return table


def tiles(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the main numbers of a `metrics.json`: each measure with its difference."""
    comparison = metrics.get("comparison") or {}
    found = []
    for name, value in metrics["measures"].items():
        tile = {"measure": name, "value": f"{value:.4f}", "difference": "", "style": "same", "p": ""}
        if name in comparison:
            entry = comparison[name]
            style = "gain" if entry["delta"] > 0 else "loss" if entry["delta"] < 0 else "same"
            significant = entry["p_value_holm"] < 0.05
            tile |= {"difference": f"{entry['delta']:+.4f}", "style": style if significant else "same"}
            p = p_text(entry["p_value_holm"])
            tile["p"] = f"p {p}" if p.startswith("<") else f"p = {p}"
        found.append(tile)
    return found


def means(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return a table of the means (label -> measure -> mean) of several runs; the best mean of a measure has a star."""
    names = list(next(iter(evaluations.values())))
    best = {name: max(values[name] for values in evaluations.values()) for name in names}
    rows = [
        [label, *(f"{values[name]:.4f}{' ★' if values[name] == best[name] else ''}" for name in names)]
        for label, values in evaluations.items()
    ]
    return {"caption": "Means", "head": ["run", *names], "rows": rows, "note": "★: the best run of a measure."}


def pairs(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of all pairs of runs; see `ranker.evaluation.comparison.compare_pairs`."""
    rows = [
        [
            entry["measure"],
            f"{entry['run']} − {entry['baseline']}",
            f"{entry['delta']:+.4f}",
            *(p_text(entry[key]) for key in ("p_value", "p_value_t", "p_value_holm")),
            f"{entry['wins']} / {entry['losses']} / {entry['ties']}",
        ]
        for entry in comparisons
    ]
    head = ["measure", "runs", "difference", "p", "p (t)", "p (Holm)", "better / worse / same"]
    note = TESTS.format(family=f"all {len(rows)} comparisons of this table")
    return {"caption": "Differences of means", "head": head, "rows": rows, "note": note}


def overlaps(labels: Sequence[str], shares: Mapping[tuple[str, str], float], depth: int) -> dict[str, Any]:
    """Return a table with the mean share of common documents among the first `depth`, for each pair of runs."""
    rows = [
        [one, *("" if one == other else f"{shares[one, other] if (one, other) in shares else shares[other, one]:.3f}"
                for other in labels)]
        for one in labels
    ]  # fmt: skip
    note = f"Mean over the queries of the share of common documents among the first {depth}."
    return {"caption": f"Overlap of the first {depth}", "head": ["run", *labels], "rows": rows, "note": note}


def overview(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table of several sets with the first measure of each set.

    Args:
        sets: Name of a set -> content of its `metrics.json`.
    """
    rows = []
    for name, metrics in sets.items():
        measure = next(iter(metrics["measures"]), None)
        entry = (metrics.get("comparison") or {}).get(measure)
        row = [
            name,
            str(metrics["num_queries"]),
            measure or "",
            f"{metrics['measures'][measure]:.4f}" if measure else "",
        ]
        rows.append(row + ([f"{entry['delta']:+.4f}", p_text(entry["p_value"])] if entry else ["", ""]))
    head = ["set", "queries", "measure", "run", "difference", "p"]
    note = "p: paired randomisation test, not corrected for the number of sets."
    return {"caption": "Sets", "head": head, "rows": rows, "note": note}
