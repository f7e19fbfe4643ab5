"""Run the jobs of a sweep and record each job in its folder. This module imports neither Hydra nor torch.

A job writes `job.json` when it starts, and holds a lock beside that file while it runs: a job with status `running` and
no lock was killed. `summary.csv` in the sweep's folder is computed from the files `job.json` after each job and at the
end, so the table exists even if the process that started the sweep is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranker.cli.sweep_table import JOB_FILE, LOCK_FILE, JobRecord, write_summary
from ranker.config.roots import CONF
from ranker.errors import ConfigError, DataError, Preempted, RankerError
from ranker.files.writing import write_whole
from ranker.run_folder import check_unused

log = logging.getLogger(__name__)

JOB_FOLDER = "RANKER_JOB_FOLDER"  # environment variable: the folder of a job that runs in a separate process


class JobFailed(RankerError):
    """The error of a job whose separate process failed; that process has already printed the error."""


def run_job(
    sweep: Path, folder: Path, number: int, overrides: Sequence[str], run: Callable[[], float | None]
) -> float | None:
    """Run one job and record its result. A failure is recorded and printed, and the sweep continues.

    Args:
        sweep: The sweep's folder.
        folder: The job's folder, used by no other job.
        number: The job's number.
        overrides: The overrides of the job.
        run: Runs the job and returns the objective.

    Returns:
        The objective; None for a job that failed or has none.

    Raises:
        ConfigError: The folder belongs to another job.
    """
    configured = [override for override in overrides if not override.startswith("++callbacks.prune=")]
    record: JobRecord = {
        "job": number,
        "overrides": configured,
        "status": "running",
        "objective": None,
        "seconds": None,
        "error": None,
    }
    _create_record(folder, record)
    from filelock import FileLock  # imports asyncio, which a run without a sweep does not need

    lock = FileLock(folder / LOCK_FILE)
    lock.acquire()
    log.info("job %d: %s", number, " ".join(configured))
    started = time.perf_counter()
    try:
        record["objective"] = run()
        record["status"] = "pruned" if _result(folder).get("pruned") else "ok"
    except Exception as error:  # not `Preempted`, for which `run` raises SystemExit
        record["status"], record["error"] = "failed", message_of(error)
        _log_failure(folder, "".join(traceback.format_exception(error)))
        for line in record["error"].split("\n"):
            print(f"error: job {number}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - as `entry.user_errors`
    except BaseException as stop:
        record["status"], record["error"] = "stopped", type(stop).__name__
        raise
    finally:
        record["seconds"] = time.perf_counter() - started
        _write_text(folder / JOB_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        lock.release()
        write_summary(sweep)
    return record["objective"]


def message_of(error: BaseException) -> str:
    """The message of an error. It begins with the type of the error, unless the error is a user's mistake."""
    cause = error.__cause__
    if isinstance(error, RankerError) or isinstance(cause, RankerError):
        return str(error if isinstance(error, RankerError) else cause)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _create_record(folder: Path, record: JobRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / JOB_FILE).exists():
        check_unused("hydra.sweep.subdir", folder, [".hydra"])
    try:
        with (folder / JOB_FILE).open("x", encoding="utf-8") as file:
            json.dump(record, file)
    except FileExistsError:
        raise ConfigError(
            f"hydra.sweep.subdir: expected a folder for each job, got {folder} for job {record['job']} "
            "and for an earlier one; put ${hydra.job.num} into it"
        ) from None


def _log_failure(folder: Path, text: str) -> None:
    with (folder / "train.log").open("a", encoding="utf-8") as file:
        file.write(text)


def _write_text(path: Path, text: str) -> None:
    with write_whole(path) as file:
        file.write(text)


def run_in_separate_process(command: str, folder: Path, config: str) -> float | None:
    """Run a job in a separate process and return its objective.

    If one process of a multi-device training fails, Lightning kills the training's first process. In a separate
    process, this does not end the whole sweep.

    Args:
        command: The command, `train`.
        folder: The job's folder.
        config: The job's resolved configuration as yaml.

    Raises:
        JobFailed: The process ended with an error.
    """
    _write_text(folder / "config.yaml", config)
    arguments = [
        *(sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-m", "ranker", command),
        *("--config-path", str(folder.resolve()), "--config-name", "config", "--config-dir", str(CONF)),
        *(
            f"hydra.run.dir='{folder.resolve()}'",
            "hydra/job_logging=ranker",
            "hydra/hydra_logging=none",
            "hydra/callbacks=sweep",
            "hydra.output_subdir=null",
        ),
    ]
    variables = {**os.environ, JOB_FOLDER: str(folder.resolve())}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, errors="replace", env=variables) as process:
        previous_handler = signal.signal(
            signal.SIGTERM, lambda *_: process.terminate()
        )  # the job saves a checkpoint and exits with 75
        try:
            assert process.stderr is not None
            last_lines: list[str] = []
            for line in process.stderr:
                sys.stderr.write(line)
                last_lines = [*last_lines[-19:], line.rstrip("\n")]
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous_handler)
    if code == Preempted.exit_code:
        raise Preempted("", code)  # the process has printed the message
    if code != 0:
        errors = [line.removeprefix("error: ") for line in last_lines if line.startswith("error: ")] or last_lines[-1:]
        raise JobFailed("\n".join(dict.fromkeys(errors)) or f"its process ended with code {code}")
    return _result(folder).get("objective")


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: expected a job's result, got a file that can't be read ({error}); run the job again"
        ) from error
