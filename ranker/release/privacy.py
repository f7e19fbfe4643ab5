"""Keep paths and user names of a machine out of published files."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ranker.errors import DataError

TEXTS = (".json", ".jsonl", ".yaml", ".md", ".txt", ".trec", ".jinja", ".csv")
LOCAL = re.compile(r"^(/|~|\\\\|[A-Za-z]:[\\/]|file:)")
# keys in transformers' files whose values are places from which a part was loaded
ORIGINS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file")


def is_local(value: Any) -> bool:
    """Return whether a value is a path on a machine.

    >>> [is_local(value) for value in ("/home/me/x", "~/x", "C:/x", "beir/scifact", 3)]
    [True, True, True, False, False]
    """
    return isinstance(value, str) and LOCAL.match(value) is not None


def has_local(node: Any) -> bool:
    """Return whether plain mappings and lists contain a path on a machine."""
    if isinstance(node, dict):
        return any(has_local(value) for value in node.values())
    if isinstance(node, list):
        return any(has_local(value) for value in node)
    return is_local(node)


def without_local(node: Any) -> Any:
    """Return plain mappings and lists in which each local path is replaced by its last part.

    >>> without_local({"name": "/home/me/bert", "layers": [2]})
    {'name': 'bert', 'layers': [2]}
    """
    if isinstance(node, dict):
        return {key: without_local(value) for key, value in node.items()}
    if isinstance(node, list):
        return [without_local(value) for value in node]
    return re.split(r"[\\/]", node.rstrip("\\/"))[-1] if is_local(node) else node


def forget_origins(folder: Path) -> None:
    """Remove from a model's JSON files the paths from which its parts were loaded."""
    for path in folder.rglob("*config.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in content.items() if not (key in ORIGINS and is_local(value))}
        if kept != content:
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_private(folder: Path, paths: Iterable[Path]) -> None:
    """Check that text files contain no path of this machine and no path with the user's name.

    Args:
        folder: The files.
        paths: Folders that files may not name, such as the run folder.

    Raises:
        DataError: A file contains such a path; the message names the file and the path.
    """
    traces = [re.escape(str(path)) for path in (*paths, Path.home(), Path.cwd()) if len(path.parts) > 1]
    traces.append(rf"[\\/](?:home|Users)[\\/]{re.escape(getpass.getuser())}\b")
    pattern = re.compile("|".join(rf"(?:{trace})(?![\w-])" for trace in traces))
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TEXTS:
            found = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                raise DataError(
                    f"{path.relative_to(folder)}: expected no path of this machine in a published file, got "
                    f"{found.group()!r}; take it out of the run's model/ or settings"
                )
