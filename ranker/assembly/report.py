"""Collect a command's measures of each set, and write them to `report.html`. This module imports no torch."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ranker.data.collection import Collection
from ranker.evaluation.learning_curves import read_curves
from ranker.reports import charts, tables
from ranker.reports.content import Facts, Limits, RankedSet, SetContent, Texts, set_content, with_terms
from ranker.reports.page import Page, write_page

if TYPE_CHECKING:  # ranker.types imports torch
    from ranker.types import Qrels, Run

log = logging.getLogger(__name__)

REPORT = "report.html"


class Report:
    """The page of one run.

    Args:
        cfg: The command's configuration; `report` limits the numbers of queries and docs on the page.

    Attributes:
        wanted: False with `report=none`, which leaves out the page and the pictures.
    """

    def __init__(self, cfg: DictConfig) -> None:
        options = dict(cfg.get("report") or {})  # the configuration of an earlier version has no `report`
        self.wanted = bool(options.pop("write", True))
        self._limits = Limits(**{str(key): value for key, value in options.items()})
        self._relevance = int(cfg.get("relevance", 1))
        self._sets: list[SetContent] = []
        self._metrics: dict[str, Mapping[str, Any]] = {}

    def add(
        self,
        folder: Path,
        name: str,
        run: Run,
        baseline: tuple[str, Run] | None,
        qrels: Qrels,
        collection: Collection | None = None,
    ) -> None:
        """Add a set after its evaluation.

        Args:
            folder: The run folder; `evaluation/SET/` has the files of the evaluation.
            name: Name of the set.
            run: query_id -> doc_id -> score.
            baseline: Label (not `run`) and scores of the run with which this one is compared; None: no comparison.
            qrels: query_id -> doc_id -> relevance.
            collection: The set, for its texts; None: the page shows ids only.
        """
        if not self.wanted:
            return
        of_set = folder / "evaluation" / name
        metrics = json.loads((of_set / "metrics.json").read_text(encoding="utf-8"))
        with (of_set / "per_query.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        runs, values = {"run": run}, {"run": {row["query_id"]: row["measures"] for row in rows}}
        if baseline is not None and "comparison" in metrics:
            label, other = baseline
            runs = {label: other, **runs}
            values = {label: {row["query_id"]: row["baseline"] for row in rows}, **values}
        part = RankedSet(
            name,
            runs,
            qrels,
            values,
            collection.relevance if collection is not None else self._relevance,
            Texts(collection.queries, collection.docs) if collection is not None else None,
        )
        self.add_set(part, _facts(part, metrics))
        self._metrics[name] = metrics

    def add_set(self, part: RankedSet, facts: Facts) -> None:
        """Add the runs of a set.

        Args:
            part: The runs and their values.
            facts: The facts that the page shows above the queries.
        """
        if self.wanted:
            content = with_terms(set_content(part, self._limits))
            content.facts = facts
            self._sets.append(content)

    def write(
        self, folder: Path, title: str, facts: Mapping[str, str], runs: Sequence[Path] = (), monitor: str | None = None
    ) -> None:
        """Write the page into the run folder.

        Args:
            folder: The run folder.
            title: The page's title.
            facts: Label -> value, below the title.
            runs: Folders whose `metrics.csv` contains the training curves, oldest first.
            monitor: Name of the value that chooses the best checkpoint.

        Raises:
            DataError: The file can't be written.
        """
        if not self.wanted:
            return
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        environment.pop("command", None)
        page = Page(
            title,
            {**facts, "Started": str(environment.get("time", ""))},
            command_line(),
            (folder / "config.yaml").read_text(encoding="utf-8"),
            {
                "working directory": str(HydraConfig.get().runtime.cwd),
                **{key: _shown(value) for key, value in environment.items() if value not in (None, [], {})},
            },
            charts.training(read_curves(*runs), monitor) if runs else (),
            tables.overview(self._metrics) if len(self._metrics) > 1 else None,
            self._sets,
        )
        log.info("report: %s", write_page(folder / REPORT, page, self._limits))


def _facts(part: RankedSet, metrics: Mapping[str, Any]) -> Facts:
    """Return the facts about a run and its baseline that the page shows above the queries."""
    if not metrics["measures"]:  # no query is judged
        return Facts(warnings=metrics["warnings"])
    labels = list(part.runs)
    table = tables.measures(metrics, labels[-1], labels[0])
    if len(labels) == 1:
        return Facts(tables.tiles(metrics), [table], (), metrics["warnings"])
    measure = next(iter(metrics["measures"]))
    before, after = (part.values[label] for label in labels)
    pairs = [(before[query_id][measure], after[query_id][measure]) for query_id in after]
    differences = [value - other for other, value in pairs]
    drawn = [
        charts.gains(f"{measure} of each query, run minus {labels[0]}", measure, differences),
        charts.scatter(f"{measure} of each query in both", (labels[0], "run"), pairs),
    ]
    return Facts(tables.tiles(metrics), [table], drawn, metrics["warnings"])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def command_line() -> str:
    """Return the command that repeats this run. In a sweep, the command repeats only this job."""
    hydra = HydraConfig.get()
    folders = [
        f"--config-dir {shlex.quote(source.path)}"
        for source in hydra.runtime.config_sources
        if source.provider == "command-line" and source.path
    ]
    overrides = [part for part in hydra.overrides.task if not part.startswith("hydra.")]
    return " ".join(["ranker", str(hydra.job.config_name), *folders, *map(shlex.quote, overrides)])
