"""Check that this machine has what a configuration needs: existing files, writable folders, a login of wandb."""

from __future__ import annotations

import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, ListConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.sets import source_nodes
from ranker.config.writing import WRITING, writing_faults
from ranker.files.folders import leads_out

INPUTS = (
    "checkpoint",
    "compare",
    "run",
    "queries",
    "docs",
    "qrels",
    "runs",
    "tune.runs",
    "tune.qrels",
    "baseline",
    "candidates",
    "mining.teacher",
    "teacher",
    "distill.teacher",
    "distill.report",
)  # keys that name an existing file or folder, or a list of them
FOLDERS = ("cache_dir", "encode.folder")  # keys that name a folder to write to


def environment_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each file, folder or login that a configuration needs and this machine lacks."""
    return [*_logger(cfg), *_writing(cfg), *_inputs(cfg), *_folders(cfg)]


def _logger(cfg: DictConfig) -> list[str]:
    """Check wandb's mode, and its API key for `online` (PC-88): without a key, wandb waits for input on a terminal."""
    if not str(OmegaConf.select(cfg, "logger._target_")).endswith(".loggers.wandb"):
        return []
    mode = cfg.logger.get("mode")
    if mode not in ("offline", "online", "disabled"):
        return [f"logger.mode: expected offline, online or disabled; got {mode!r}"]
    if mode == "online" and not os.environ.get("WANDB_API_KEY"):
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        if not _has_login(host):
            return [
                f"logger.mode: expected a key for mode online, got none for {host}; "
                "set WANDB_API_KEY, run `wandb login`, or take logger.mode=offline"
            ]
    return []


def _has_login(host: str) -> bool:
    """Whether the netrc file that `wandb login` writes has a password for a host."""
    at_home = [path for path in (Path.home() / ".netrc", Path.home() / "_netrc") if path.is_file()]
    path = Path(os.environ["NETRC"]).expanduser() if os.environ.get("NETRC") else next(iter(at_home), None)
    try:
        entry = netrc(path).authenticators(host) if path is not None else None
    except (OSError, NetrcParseError):
        return False
    return entry is not None and bool(entry[2])


def _writing(cfg: DictConfig) -> list[str]:
    """Return one fault for each path that leads out of the run folder."""
    nodes: dict[str, Any] = {
        key: OmegaConf.to_container(cfg[key], resolve=True) for key in WRITING if isinstance(cfg.get(key), DictConfig)
    }
    faults = writing_faults(nodes)
    name = cfg.get("name") if is_set(cfg, "name") else ""
    if leads_out(str(name)):
        faults.append(f"name: expected a folder below outputs/, got {name!r}")
    return faults


def _inputs(cfg: DictConfig) -> list[str]:
    faults = []
    of_sources = [f"{path}.{key}" for path in source_nodes(cfg) for key in ("negatives", "teacher")]
    for key in (*INPUTS, *of_sources):
        value = OmegaConf.select(cfg, key) if is_set(cfg, key.split(".")[0]) else None
        is_first_stage = key == "baseline" and value == "bm25" and "index" in cfg
        for path in value if isinstance(value, ListConfig) else [value]:
            if isinstance(path, str) and not _exists(path) and not is_first_stage:
                faults.append(f"{key}: expected a file or folder, got {path!r}, which does not exist")
    if cfg.get("resume") and not cfg.get("checkpoint"):
        faults.append("resume: expected checkpoint=RUN_FOLDER beside resume=true, got none")
    return faults


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # the name is too long, or contains a NUL
        return False


def _folders(cfg: DictConfig) -> list[str]:
    values = {key: OmegaConf.select(cfg, key) for key in FOLDERS}
    return [
        f"{key}: {fault}; set another {key}"
        for key, value in values.items()
        if isinstance(value, str)
        for fault in _unwritable(Path(value))
    ]


def _unwritable(path: Path) -> list[str]:
    """Return why a folder, which need not exist yet, is not writable; empty if it is writable."""
    try:
        existing = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists() or folder.is_symlink()
        )
        if not existing.is_dir():
            got = "a broken link" if existing.is_symlink() else "a file"
            return [f"expected a folder, got {str(path)!r}, where {str(existing)!r} is {got}"]
        if not os.access(existing, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return [
                f"expected a folder to write to, got {str(path)!r}, where {str(existing)!r} "
                "is not writable for this user"
            ]
    except OSError as error:
        return [f"expected a folder to write to, got {str(path)[:60]!r} ({error.strerror})"]
    return []
