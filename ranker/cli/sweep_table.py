"""The records of a sweep's jobs, and the table and picture of all jobs. Needs neither Hydra nor torch."""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ranker.files.writing import write_whole

log = logging.getLogger(__name__)

JOB_FILE, LOCK_FILE, SUMMARY = "job.json", ".job.lock", "summary.csv"
KILLED_MESSAGE = "its process was killed"
JobRecord = dict[str, Any]


def job_folders(sweep: Path) -> Iterator[Path]:
    """Yield the folders of all jobs that have started, at any depth below the sweep's folder."""
    for path in sorted(sweep.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            if (path / JOB_FILE).is_file() or (path / ".hydra").is_dir():
                yield path
            else:
                yield from job_folders(path)


def read_job(folder: Path) -> JobRecord:
    """Return the record of a job. The status `running` becomes `killed` if no process holds the job's lock."""
    row: JobRecord = {
        "job": None,
        "overrides": [],
        "status": "running",
        "objective": None,
        "seconds": None,
        "error": None,
    }
    with suppress(OSError, ValueError, TypeError):  # the file is missing or damaged
        row |= json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    if row["status"] == "running" and not is_locked(folder / LOCK_FILE):
        row |= {"status": "killed", "error": KILLED_MESSAGE}
    return row


def read_jobs(sweep: Path) -> list[JobRecord]:
    """Return the records of all jobs, sorted by job number, each with its folder and its measures."""
    rows = []
    for folder in job_folders(sweep):
        row = read_job(folder)
        measures: dict[str, float] = {}
        for file in sorted((folder / "evaluation").rglob("metrics.json")):
            name = file.parent.relative_to(folder / "evaluation").as_posix()
            try:
                means = json.loads(file.read_text(encoding="utf-8"))["measures"]
                measures |= {f"{name}/{measure}": float(value) for measure, value in means.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning(
                    "%s: expected an evaluation's measures, got a file that can't be read (%s); left out of the table",
                    file,
                    error,
                )
        rows.append(row | {"folder": folder.relative_to(sweep).as_posix(), "measures": measures})
    return sorted(rows, key=lambda row: (row["job"] is None, row["job"], row["folder"]))


def swept_values(rows: Sequence[JobRecord]) -> dict[str, list[str | None]]:
    """Return the keys whose value differs between jobs -> the value in each job.

    >>> swept_values([{"overrides": ["loss=lce", "seed=1"]}, {"overrides": ["loss=kl", "seed=1"]}])
    {'loss': ['lce', 'kl']}
    """
    values = [dict(override.split("=", 1) for override in row["overrides"] if "=" in override) for row in rows]
    keys = dict.fromkeys(key for job_values in values for key in job_values)
    columns = {key.lstrip("+"): [job_values.get(key) for job_values in values] for key in keys}
    return {key: column for key, column in columns.items() if len(set(column)) > 1}


def write_summary(sweep: Path) -> list[JobRecord]:
    """Write `summary.csv` with one line per job; return the records of `read_jobs`."""
    rows = read_jobs(sweep)
    columns = swept_values(rows)
    measures = list(dict.fromkeys(name for row in rows for name in row["measures"]))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["job", "status", "objective", *columns, *measures, "seconds", "folder", "overrides", "error"])
    for i, row in enumerate(rows):
        seconds = None if row["seconds"] is None else round(row["seconds"], 1)
        table.writerow(
            [
                row["job"],
                row["status"],
                row["objective"],
                *(column[i] for column in columns.values()),
                *(row["measures"].get(name) for name in measures),
                seconds,
                row["folder"],
                " ".join(row["overrides"]),
                row["error"],
            ]
        )
    with write_whole(sweep / SUMMARY) as file:
        file.write(text.getvalue())
    return rows


def finish_sweep(sweep: Path, maximize: bool = True, min_finished: int | None = None) -> bool:
    """Write the table and the picture, print the table, and print one line for each job that failed.

    Args:
        sweep: The sweep's folder.
        maximize: Whether a higher objective is better.
        min_finished: For a search, which replaces failed trials: the sweep is successful if at least this many jobs
            finished or were pruned. None: every job must finish or be pruned.

    Returns:
        Whether the sweep is successful.
    """
    rows = write_summary(sweep)
    print_table(rows, maximize)
    print(f"sweep: {sweep / SUMMARY}", file=sys.stderr)  # noqa: T201
    if any(row["objective"] is not None for row in rows):
        from ranker.cli.sweep_picture import draw_sweep
        from ranker.evaluation.figures import save

        save(draw_sweep(rows, swept_values(rows), maximize), sweep, "sweep")
    failed = [row for row in rows if row["status"] not in ("ok", "pruned")]
    finished = sum(
        row["status"] == "pruned" or (row["status"] == "ok" and row["objective"] is not None) for row in rows
    )
    successful = not failed if min_finished is None else finished >= min_finished
    for row in failed:
        reason = (row["error"] or KILLED_MESSAGE).split("\n")[0]
        level = "warning" if successful else "error"
        text = f"{level}: job {row['job']} {row['status']}: {reason}; see {sweep / row['folder']}"
        print(text, file=sys.stderr)  # noqa: T201
    return successful


def best_job(rows: Sequence[Mapping[str, Any]], maximize: bool = True) -> Mapping[str, Any] | None:
    """Return the finished job with the best objective; None if no job has an objective."""
    done = [row for row in rows if row["status"] == "ok" and row["objective"] is not None]
    return max(done, key=lambda row: row["objective"] if maximize else -row["objective"], default=None)


def print_table(rows: Sequence[JobRecord], maximize: bool = True) -> None:
    """Print one line per job; a star marks the best."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns, best = swept_values(rows), best_job(rows, maximize)
    table = Table(title=f"sweep ({len(rows)} jobs)", title_justify="left")
    for heading in ("job", "status", "objective", *columns, "seconds"):
        table.add_column(heading, justify="right" if heading in ("job", "objective", "seconds") else "left")
    for i, row in enumerate(rows):
        objective = "" if row["objective"] is None else f"{row['objective']:.4f}" + (" *" if row is best else "  ")
        values = [str(column[i] if column[i] is not None else "") for column in columns.values()]
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        table.add_row(*map(Text, [str(row["job"]), row["status"], objective, *values, seconds]))
    Console().print(table)


def is_locked(lock: Path) -> bool:
    """Return whether a running process holds a lock file; the operating system releases the locks of a dead process."""
    if not lock.is_file():
        return False
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock, timeout=0):
            return False
    except (Timeout, OSError, NotImplementedError):  # if the test fails, the job counts as running
        return True
