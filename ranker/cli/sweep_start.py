"""Checks before the first job of a sweep: its folder is unused, and its jobs can be counted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from ranker import run_folder
from ranker.errors import ConfigError


def check_unused_by_sweep(folder: Path) -> None:
    """Exit if a sweep's folder holds files, other than those that a sweep leaves that was killed early."""
    killed = [path.name for path in folder.glob(".*.multirun.yaml.partial")]
    check_unused("hydra.sweep.dir", folder, killed)


def check_unused(key: str, folder: Path, expected: Sequence[str] = ()) -> None:
    """Exit if a folder holds other files than `expected`, see `ranker.run_folder.check_unused`."""
    try:
        run_folder.check_unused(key, folder, expected)
    except ConfigError as error:
        fail(str(error))


def num_jobs(config: DictConfig) -> str:
    """Return the number of jobs of Hydra's basic sweeper, as text."""
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *config.hydra.overrides.task])
    if any(override.is_sweep_override() and not override.is_discrete_sweep() for override in parsed):
        fail(
            "sweep: expected lists of values, such as lr=1e-4,1e-3, got an interval; "
            "hydra/sweeper=optuna or sweep=optuna_monobert can draw from it"
        )
    return str(sum(map(len, BasicSweeper.split_arguments(parsed, None))))


def fail(message: str) -> None:
    """Print an error and exit, because Hydra only warns of a callback's errors."""
    print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
    raise SystemExit(1)
