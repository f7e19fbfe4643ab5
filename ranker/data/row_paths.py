"""Find files of rows by name or glob, in folders that `datasets` saved, or on the hub."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

from ranker.data.corpus_files import check_regular
from ranker.data.parsing import shown
from ranker.errors import DataError
from ranker.files.folders import leads_out

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}
EXTRA = "pip install -e '.[rows]'"


def find_files(names: str | list[str], key: str, split: str) -> list[Path]:
    """Return the files that names stand for: files, globs, folders that `datasets` saved, or names on the hub.

    Args:
        names: One name or several names. `NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT` is a data set on the hub if the
            name has no known ending and no file with this name exists; the package `datasets` downloads its files.
        key: Config key, for messages.
        split: Split to use if a folder or a data set on the hub has several splits.

    Raises:
        DataError: A file does not exist or has no known ending, or a package is missing.
    """
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_dir():
            found = _saved_files(path, split)
        elif path.exists():
            found = [path]
        elif glob.has_magic(name):
            found = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - absolute patterns, too
        elif kind_of(path) is None and not name.startswith(("/", ".", "~")):
            found = _hub_files(name, key, split)
        else:
            found = []
        if not found:
            raise DataError(f"{key}: expected files, got {name!r}, which matches none; check the path")
        paths += found
    for path in paths:
        check_regular(path)
        if kind_of(path) is None:
            raise DataError(
                f"{key}: expected files that end in {', '.join(KINDS)} (or .gz after a text file's), "
                f"got {str(path)!r}; rename or convert it"
            )
    return paths


def kind_of(path: Path) -> str | None:
    """Return the format of a file by its ending, without `.gz`; None for an unknown ending."""
    packed = path.suffix == ".gz"
    kind = KINDS.get(Path(path.stem).suffix.lower() if packed else path.suffix.lower())
    return None if packed and kind in ("parquet", "arrow") else kind


def _saved_files(folder: Path, split: str) -> list[Path]:
    """Return the files of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    if (folder / "dataset_dict.json").is_file():
        names = {"train": ["train"], "val": ["validation", "val", "dev"], "test": ["test"]}.get(split, [split])
        known = _json(folder / "dataset_dict.json").get("splits", [])
        chosen = next((name for name in names if name in known), None)
        if chosen is None or leads_out(str(chosen)):
            raise DataError(
                f"{folder}: expected the split {names[0]}, got {', '.join(map(str, known)) or 'none'}; "
                "name the folder of one split"
            )
        folder = folder / chosen
    if not (folder / "state.json").is_file():
        raise DataError(
            f"{folder}: expected a folder that `datasets` saved (with state.json), got another; name its files, as "
            f"'{folder}/*.parquet'"
        )
    files = [str(part.get("filename")) for part in _json(folder / "state.json").get("_data_files", [])]
    if any(leads_out(name) for name in files):
        raise DataError(f"{folder / 'state.json'}: expected files inside the folder, got {files}; save it again")
    return [folder / name for name in files]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, got {error}; save the data set again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got {shown(content)}; save the data set again")
    return content


def _hub_files(name: str, key: str, split: str) -> list[Path]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{key}: expected a file, got {name!r}, which does not exist; as the name of a data set on the hub it "
            f"needs the package datasets: {EXTRA}"
        ) from None
    parts = name.split(":")
    config, chosen = (parts[1] if len(parts) > 2 else None), (parts[-1] if len(parts) > 1 else split)
    try:
        loaded = datasets.load_dataset(parts[0], config, split="validation" if chosen == "val" else chosen)
    except Exception as error:  # the package raises errors of many classes: no network, unknown name, unknown split
        raise DataError(
            f"{key}: expected a file or the name of a data set on the hub, got {name!r} "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); check the name"
        ) from error
    return [Path(part["filename"]) for part in loaded.cache_files]
