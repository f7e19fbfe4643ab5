"""Write a run folder's files (JSON, text, log), and describe the run's environment. This module imports no torch."""

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

from ranker.files.writing import write_whole

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
    """Write a text file, which is complete or absent at any time."""
    with write_whole(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, which is complete or absent at any time."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def environment(seed: int) -> dict[str, Any]:
    """Return versions, git revision, hardware, seed and command of this process.

    `threads`, `gpus` and `cuda` are left out if this process has not imported torch: it then computes nothing with it.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        **_hardware(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_revision(),
    }


def _hardware() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Return the revision of the source, with `-dirty` if files differ from it; None outside a git checkout."""
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


class _LogFile(logging.FileHandler):
    """A log file that warns once if it can't be written to. `logging` would print a traceback for each line."""

    warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # another error means that the arguments of the logging call are wrong
            super().handleError(record)
        elif not self.warned:
            self.warned = True
            text = f"warning: {self.baseFilename}: expected room for the log, got {error.strerror!r}; lines are missing"
            print(text, file=sys.stderr)  # noqa: T201


def log_to(path: Path) -> logging.Handler:
    """Write the log also to a file; return the handler, which the caller removes at the end of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler
