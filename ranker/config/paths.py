"""Make the paths in a configuration absolute, so that the configuration means the same in every working directory."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from ranker.config.roots import CONF
from ranker.config.sets import source_nodes
from ranker.config.signatures import parameters_of

# Keys that are always paths. Parameters with the annotation `Path` are paths, too, in the `_target_` of `data`,
# `probe`, `model` and `distill`.
PATHS = (
    "checkpoint",
    "compare",
    "run",
    "runs",
    "queries",
    "docs",
    "qrels",
    "tune.runs",
    "tune.qrels",
    "candidates",
    "cache_dir",
    "token_file",
    "mining.teacher",
    "teacher",
    "reader.answers",
    "encode.folder",
)
READER = "reader"  # this value of `teacher` is not a path
DATA_PATHS = ("negatives", "teacher", "expansion")  # keys of every source that are paths
# Keys that are paths if a file or folder with that name exists; otherwise words (`bm25`) or ids of models.
PATHS_IF_EXISTING = ("baseline", "encoder.name", "reader.name")
DATA_PATHS_IF_EXISTING = ("train_candidates", "candidates")
# The source whose `candidates` are relative to its `path`.
RELATIVE_TO_DATA = "ranker.data.sources.files.Files"
# The source whose keys are files, globs of files, or names of data sets on the hub.
ROWS = "ranker.data.sources.rows.Rows"
ROWS_FILES = ("train", "val", "test", "docs", "queries")


def make_absolute(cfg: DictConfig) -> None:
    """Replace relative paths by absolute paths in place; `~/...` means the same everywhere and stays."""
    for key in PATHS:
        if key == "teacher" and OmegaConf.select(cfg, key) == READER:
            continue
        _replace(cfg, key, if_existing=False)
    for key in PATHS_IF_EXISTING:
        if key == "encoder.name" and (OmegaConf.select(cfg, "encoder.package") or OmegaConf.select(cfg, key) == "tiny"):
            continue
        if key == "baseline" and "index" in cfg and "baseline" in cfg and cfg.baseline == "bm25":
            continue
        _replace(cfg, key, if_existing=True)
    for node in source_nodes(cfg).values():
        _replace_in_source(node)
    for node, target in _built_nodes(cfg):
        for name, parameter in _parameters(target).items():
            if parameter.is_path:
                _replace(node, name, if_existing=False)


def _replace_in_source(node: DictConfig) -> None:
    """Make the paths in a source's node absolute, except the parameters that its signature declares as paths."""
    for key in DATA_PATHS:
        _replace(node, key, if_existing=False)
    for key in DATA_PATHS_IF_EXISTING:
        if key != "candidates" or node.get("_target_") != RELATIVE_TO_DATA:
            _replace(node, key, if_existing=True)
    if node.get("_target_") == ROWS:
        for key in ROWS_FILES:
            _replace(node, key, if_existing=True)


def _built_nodes(cfg: DictConfig) -> Iterator[tuple[DictConfig, str]]:
    """Yield each node whose signature may declare paths, with its `_target_`; also the options of multitask heads."""
    for group in ("data", "suite", "probe", "model", "distill"):
        yield from _with_target(OmegaConf.select(cfg, group))
    for head in OmegaConf.select(cfg, "model.heads") or ():
        if isinstance(head, DictConfig) and isinstance(head.get("options"), DictConfig):
            path = CONF / "probe" / f"{head.get('task')}.yaml"
            if path.is_file():
                yield head.options, str(OmegaConf.select(OmegaConf.load(path), "_target_"))


def _with_target(node: Any) -> Iterator[tuple[DictConfig, str]]:
    if isinstance(node, DictConfig):
        if isinstance(node.get("_target_"), str):
            yield node, str(node.get("_target_"))
        for key in node:
            if not OmegaConf.is_missing(node, key):
                yield from _with_target(node.get(key))


def _parameters(target: str) -> dict[str, Any]:
    try:
        return parameters_of(target) or {}
    except LookupError:
        return {}


def split_by_folder(sets: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the sets of a suite into those that can be read and those whose folder is missing.

    Args:
        sets: Name -> node of `data`.

    Returns:
        Two mappings: name -> node of each set that can be read; name -> missing folder of each other set.
    """
    missing = {
        name: str(node.path)
        for name, node in sets.items()
        if node._target_ == RELATIVE_TO_DATA and not Path(node.path).expanduser().is_dir()
    }
    return {name: node for name, node in sets.items() if name not in missing}, missing


def _replace(cfg: DictConfig, key: str, if_existing: bool) -> None:
    """Make a path, or all paths of a list or mapping, absolute.

    Args:
        cfg: The configuration, or a node of it.
        key: Dotted key.
        if_existing: If true, a value changes only if the file or folder exists.
    """
    value: Any = OmegaConf.select(cfg, key)
    if isinstance(value, str):
        OmegaConf.update(cfg, key, _absolute(value, if_existing))
    else:
        _replace_parts(value, if_existing)


def _replace_parts(value: Any, if_existing: bool) -> None:
    if isinstance(value, (DictConfig, ListConfig)):
        for part in list(value) if isinstance(value, DictConfig) else range(len(value)):
            if isinstance(value[part], str):
                value[part] = _absolute(value[part], if_existing)
            else:
                _replace_parts(value[part], if_existing)


def _absolute(value: str, if_existing: bool) -> str:
    if not value or value.startswith("~") or (if_existing and not _exists(value)):
        return value
    return os.path.abspath(value)  # noqa: PTH100 - Path.resolve would follow links


def _exists(value: str) -> bool:
    """Return whether a file or folder has this name, or matches this glob pattern."""
    return Path(value).exists() or (glob.has_magic(value) and next(glob.iglob(value, recursive=True), None) is not None)  # noqa: PTH207
