"""Find the TREC runs of a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranker.errors import ConfigError

RUN, EVALUATION = "run.trec", "evaluation"


def runs_of(path: Path) -> dict[str, Path]:
    """Return set name -> run file for the runs at a path.

    Args:
        path: A TREC run, or a run folder with `evaluation/SET/run.trec` (of train, evaluate, search) or `run.trec` (of
            rerank, fuse). A run without SET has the set name "".
    """
    if not path.is_dir():
        return {"": path}
    found = {file.parent.relative_to(path / EVALUATION).as_posix(): file for file in (path / EVALUATION).rglob(RUN)}
    return dict(sorted(found.items())) or ({"": path / RUN} if (path / RUN).is_file() else {})


def only_run(key: str, path: Path) -> Path:
    """Return the run at a path that has one run.

    Raises:
        ConfigError: The path has no run, or several runs.
    """
    found = runs_of(path)
    if len(found) != 1:
        got = f"the runs of {', '.join(found)}; name one file" if found else "no run; name a run file or a run folder"
        raise ConfigError(f"{key}: expected a TREC run or a run folder with one run, got {path} with {got}")
    return next(iter(found.values()))


def listed(key: str, value: Any, least: int = 2, most: int = 10) -> list[str]:
    """Return a list of texts from the configuration.

    Raises:
        ConfigError: The value is not a list of `least` to `most` texts.
    """
    entries = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not least <= len(entries) <= most or not all(isinstance(entry, str) and entry for entry in entries):
        raise ConfigError(f"{key}: expected a list of {least} to {most} paths, as [A,B]; got {value!r}")
    return entries
