"""Settings that are paths, made absolute, so that a stored configuration means the same in every folder it is read from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

# a path whenever they are set. `data.candidates` of data=files is relative to `data.path` and stays as it is
PATHS = (
    "checkpoint",
    "compare",
    "run",
    "qrels",
    "candidates",
    "cache_dir",
    "data.path",
    "data.negatives",
    "data.teacher",
    "mining.teacher",
    "encode.folder",
    "model.auto.report",
)
# a path where there is a file or folder of that name, else a word (`bm25`) or the id of a model
PERHAPS = ("baseline", "encoder.name", "data.train_candidates", "data.candidates")
# keys of a probing task, of which a configuration holds several
TASK_PATHS = ("path", "vectors")
RELATIVE_TO_DATA = "ranker.data.sources.files.Files"


def make_absolute(cfg: DictConfig) -> None:
    """Replace relative paths by absolute ones, in place; `~/...` stays, since it means the same everywhere."""
    for key in PATHS:
        _replace(cfg, key, needed=False)
    for key in PERHAPS:
        if key == "encoder.name" and (OmegaConf.select(cfg, "encoder.package") or OmegaConf.select(cfg, key) == "tiny"):
            continue
        if key == "baseline" and "index" in cfg and cfg.baseline == "bm25":
            continue
        if key == "data.candidates" and OmegaConf.select(cfg, "data._target_") == RELATIVE_TO_DATA:
            continue
        _replace(cfg, key, needed=True)
    for node in _tasks(cfg):
        for key in TASK_PATHS:
            _replace(node, key, needed=False)


def _tasks(cfg: DictConfig) -> Iterator[DictConfig]:
    """The nodes of probing tasks: those of probe.py, and the options of a multitask model's heads."""
    probes = OmegaConf.select(cfg, "probe")
    yield from (
        (node for node in probes.values() if isinstance(node, DictConfig)) if isinstance(probes, DictConfig) else ()
    )
    for head in OmegaConf.select(cfg, "model.heads") or ():
        if isinstance(head, DictConfig) and isinstance(head.get("options"), DictConfig):
            yield head.options


def _replace(cfg: DictConfig, key: str, needed: bool) -> None:
    """Make a path, or those of a list or mapping, absolute.

    Args:
        cfg: The configuration.
        key: Dotted key.
        needed: Whether there must be such a file or folder.
    """
    value: Any = OmegaConf.select(cfg, key)
    if isinstance(value, str):
        OmegaConf.update(cfg, key, _absolute(value, needed))
    elif isinstance(value, (DictConfig, ListConfig)):
        for part in list(value) if isinstance(value, DictConfig) else range(len(value)):
            if isinstance(value[part], str):
                value[part] = _absolute(value[part], needed)


def _absolute(value: str, needed: bool) -> str:
    if not value or value.startswith("~") or (needed and not Path(value).exists()):
        return value
    return os.path.abspath(value)  # noqa: PTH100 - Path.resolve would follow links
