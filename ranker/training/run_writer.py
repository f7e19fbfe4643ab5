"""The run folder: what a run leaves so that it can be understood, repeated and gone on with."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ranker.files import write_whole

PACKAGES = (
    "ranker",
    "torch",
    "lightning",
    "transformers",
    "tokenizers",
    "hydra-core",
    "ir_datasets",
    "ir-measures",
    "bm25s",
    "numpy",
)


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    with write_whole(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def environment(seed: int) -> dict[str, Any]:
    """Versions, git revision, hardware, seed and command of this process."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "cuda": torch.version.cuda,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_revision(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Revision of the source, with `-dirty` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def log_to(path: Path) -> logging.Handler:
    """Also write this program's log to a file; returns the handler, to be removed at the end of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler
