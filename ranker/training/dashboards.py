"""Log to dashboards, besides curves: configuration, best and worst queries, TREC runs, pictures.

Each function logs what a logger supports. Weights & Biases gets everything, and TensorBoard everything except files.
The CSV logger gets only values, because the run folder contains the rest.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from ranker.errors import RankerError
from ranker.network import unreachable

log = logging.getLogger(__name__)

COUNT = 25  # number of queries at each end of a table: largest gains, and largest losses


def start(loggers: Iterable[Any], config: Mapping[str, Any], text: str) -> None:
    """Open the dashboards and log the resolved configuration.

    Args:
        loggers: Lightning's loggers.
        config: The configuration as plain values.
        text: The configuration as YAML.

    Raises:
        RankerError: wandb can't be reached or refuses to start.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            from wandb import Settings, errors

            url = os.environ.get("WANDB_BASE_URL") or str(Settings().base_url)
            if logger._wandb_init.get("mode") == "online":
                log.info("logger: wandb at %s", url)
                reason = unreachable(url)
                if reason is not None:
                    raise RankerError(
                        f"logger: expected wandb at {url} to answer, got {reason}; logger.mode=offline needs no server"
                    )
            try:
                logger.log_hyperparams(dict(config))
            except errors.Error as error:
                reason = " ".join(str(error).split())
                raise RankerError(
                    f"logger: expected wandb to start, got {reason!r}; logger.mode=offline needs no server"
                ) from error
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("config", f"```yaml\n{text}\n```")


def report(
    loggers: Iterable[Any],
    folder: Path,
    sets: Mapping[str, Mapping[str, str]],
    config: Mapping[str, Any],
    objective: float | None,
) -> None:
    """Log queries, runs, pictures and the best value of the monitored measure at the end of a training.

    Args:
        loggers: Lightning's loggers.
        folder: The run folder.
        sets: Name of each evaluated set -> query_id -> text.
        config: The resolved configuration.
        objective: Best value of the monitored measure; None: no measure is monitored.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _report_to_wandb(logger, folder, sets, objective)
        elif isinstance(logger, TensorBoardLogger):
            _report_to_tensorboard(logger, folder, sets, config, objective)
    show_pictures(loggers, folder)


def show_pictures(loggers: Iterable[Any], folder: Path) -> None:
    """Log the PNG files in the subfolder `pictures/` of the folder."""
    for path in sorted((folder / "pictures").glob("*.png")):
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(key=f"pictures/{path.stem}", images=[str(path)])
            elif isinstance(logger, TensorBoardLogger):
                import numpy as np
                from PIL import Image

                with Image.open(path) as image:
                    logger.experiment.add_image(
                        f"pictures/{path.stem}", np.asarray(image.convert("RGB")), dataformats="HWC"
                    )
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()  # otherwise values in the writer's queue are lost if the process ends now


def log_tests(trainer: Any, measures: Mapping[str, Mapping[str, float]]) -> None:
    """Log `test/SET/MEASURE` at the trainer's last step.

    Args:
        trainer: The Trainer after its fit.
        measures: Set name -> measure -> value.
    """
    values = {f"test/{name}/{measure}": value for name, means in measures.items() for measure, value in means.items()}
    for logger in trainer.loggers if values else ():
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step)
        logger.save()
        logger.finalize("success")


def _report_to_wandb(
    logger: WandbLogger, folder: Path, sets: Mapping[str, Mapping[str, str]], objective: float | None
) -> None:
    import wandb

    if objective is not None:
        logger.experiment.summary["objective"] = objective
    for name, queries in sets.items():
        columns, rows = per_query_table(folder / "evaluation" / name, queries)
        logger.log_table(key=f"queries/{name}", columns=columns, data=rows)
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", f"{logger.experiment.id}-{name}"), type="run")
        for file in ("run.trec", "per_query.jsonl", "metrics.json"):
            artifact.add_file(str(folder / "evaluation" / name / file), policy="immutable")
        logger.experiment.log_artifact(artifact)
    if (folder / "report.html").is_file():
        artifact = wandb.Artifact(f"{logger.experiment.id}-report", type="report")
        artifact.add_file(str(folder / "report.html"), policy="immutable")
        logger.experiment.log_artifact(artifact)


def _report_to_tensorboard(
    logger: TensorBoardLogger,
    folder: Path,
    sets: Mapping[str, Mapping[str, str]],
    config: Mapping[str, Any],
    objective: float | None,
) -> None:
    for name, queries in sets.items():
        columns, rows = per_query_table(folder / "evaluation" / name, queries)
        lines = [columns, ["---"] * len(columns), *rows]
        logger.experiment.add_text(
            f"queries/{name}", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        )
    if objective is not None:
        logger.log_hyperparams(dict(config), {"objective": objective})


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def per_query_table(folder: Path, queries: Mapping[str, str], count: int = COUNT) -> tuple[list[str], list[list[Any]]]:
    """Return a table of the queries with the largest gains and losses against the baseline, by the first measure.

    The best queries come first. Without a baseline, queries are sorted by the measure's value.

    Args:
        folder: `evaluation/SET/` of a run folder.
        queries: query_id -> text.
        count: Number of queries at each end; the queries between both ends are left out.

    Returns:
        The columns' names and the rows.
    """
    lines = (folder / "per_query.jsonl").read_text(encoding="utf-8").splitlines()
    rows: Sequence[Any] = [json.loads(line) for line in lines]
    if not rows:
        return ["query_id", "query"], []
    measure, *others = rows[0]["measures"]
    compared = "baseline" in rows[0]

    def gain(row: Mapping[str, Any]) -> float:
        return row["measures"][measure] - (row["baseline"][measure] if compared else 0.0)

    rows = sorted(rows, key=lambda row: (-gain(row), row["query_id"]))
    kept = rows if len(rows) <= 2 * count else [*rows[:count], *rows[-count:]]
    columns = ["query_id", "query", *([f"{measure} gain", f"{measure} baseline"] if compared else []), measure, *others]
    table = [
        [
            row["query_id"],
            queries.get(row["query_id"], ""),
            *([gain(row), row["baseline"][measure]] if compared else []),
            *(row["measures"][name] for name in (measure, *others)),
        ]
        for row in kept
    ]
    return columns, table
