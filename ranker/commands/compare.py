"""`ranker compare`: compare several runs on the same queries; torch is imported only if a data source is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ranker.assembly.comparison import Judged, files_of_sets, judgements, labels_of
from ranker.assembly.report import Report
from ranker.assembly.run import one_run, open_run
from ranker.data.trec import read_run
from ranker.errors import DataError
from ranker.evaluation.comparison import compare_pairs, overlap
from ranker.evaluation.metrics import Evaluation, evaluate
from ranker.evaluation.run_files import listed
from ranker.evaluation.significance import p_text
from ranker.reports import charts, tables
from ranker.reports.content import Facts, RankedSet
from ranker.training.run_writer import write_json

if TYPE_CHECKING:  # ranker.types imports torch
    from ranker.types import Run

log = logging.getLogger(__name__)


@one_run()
def compare(cfg: DictConfig) -> None:
    """Measure the runs of `runs=` on the same queries; write `comparison.json` and `report.html`, print the means.

    Raises:
        RankerError: An option or a file is wrong, or a set has no judgements.
    """
    paths = [Path(path) for path in listed("runs", cfg.runs)]
    labels = labels_of(cfg, paths)
    files = files_of_sets(cfg, paths)
    judged = judgements(cfg, paths, list(files))
    page, content = Report(cfg), {}
    folder = open_run(cfg)
    for name, of_set in files.items():
        runs = {label: read_run(file) for label, file in zip(labels, of_set, strict=True)}
        shown = name or cfg.name
        content[shown] = _compare(cfg, page, shown, runs, judged[name])
    write_json(folder / "comparison.json", content)
    page.write(folder, " vs ".join(labels), {label: str(path) for label, path in zip(labels, paths, strict=True)})
    for name, compared in content.items():
        print_means(name, compared)
    log.info("comparison: %s", folder / "comparison.json")


def _compare(cfg: DictConfig, page: Report, name: str, runs: Mapping[str, Run], judged: Judged) -> dict[str, Any]:
    """Measure the runs of one set and add the set to the page; return its entry of `comparison.json`."""
    if not any(judged.qrels.values()):
        raise DataError(f"{name}: expected judgements of the queries, got none; set qrels=FILE")
    evaluations = {
        label: evaluate(run, judged.qrels, list(cfg.measures), judged.relevance) for label, run in runs.items()
    }
    comparisons = compare_pairs(evaluations)
    depth = int(cfg.report.depth)
    judged_runs = {
        label: {query_id: run[query_id] for query_id in judged.qrels if query_id in run} for label, run in runs.items()
    }
    shares = {(a, b): overlap(judged_runs[a], judged_runs[b], depth) for a, b in combinations(runs, 2)}
    means = {label: evaluation.means for label, evaluation in evaluations.items()}
    values = {label: evaluation.per_query for label, evaluation in evaluations.items()}
    facts = Facts(
        tables=[tables.means(means), tables.pairs(comparisons), tables.overlaps(list(runs), shares, depth)],
        charts=_charts(evaluations),
        warnings=[f"{label}: {text}" for label, evaluation in evaluations.items() for text in evaluation.warnings],
    )
    page.add_set(RankedSet(name, runs, judged.qrels, values, judged.relevance, judged.texts), facts)
    return {
        "queries": next(iter(evaluations.values())).num_queries,
        "means": means,
        "comparisons": comparisons,
        "overlap": [{"runs": list(pair), "depth": depth, "share": share} for pair, share in shares.items()],
    }


def _charts(evaluations: Mapping[str, Evaluation]) -> list[charts.Chart]:
    """Draw the first measure of each query, in charts that compare the first run with each of the other runs."""
    (first, before), *others = evaluations.items()
    measure = next(iter(before.means))
    found = []
    for label, after in others:
        pairs = [(row[measure], after.per_query[query_id][measure]) for query_id, row in before.per_query.items()]
        differences = [value - other for other, value in pairs]
        if len(others) == 1:
            found.append(charts.gains(f"{measure} of each query, {label} minus {first}", measure, differences))
        found.append(charts.scatter(f"{measure} of each query: {first} and {label}", (first, label), pairs))
    return found


def print_means(name: str, compared: Mapping[str, Any]) -> None:
    """Print the mean measures of each run of a set, and the tests of the first measure for all pairs of runs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=Text(f"{name} ({compared['queries']} queries)"), title_justify="left")
    means = tables.means(compared["means"])
    for number, heading in enumerate(means["head"]):
        table.add_column(heading, justify="right" if number else "left")
    for row in means["rows"]:
        table.add_row(*map(Text, row))
    console.print(table)
    measure = compared["comparisons"][0]["measure"]
    for entry in compared["comparisons"]:
        if entry["measure"] == measure:
            p = p_text(entry["p_value_holm"])
            line = f"{measure}, {entry['run']} minus {entry['baseline']}: {entry['delta']:+.4f}, p (Holm) {p}"
            console.print(Text(line, "dim"))
