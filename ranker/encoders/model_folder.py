"""Check an untrusted model folder before libraries read it: its files must not name code or files outside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ranker.errors import CheckpointError
from ranker.files.folders import leads_out

MAX_BYTES = 20_000_000  # largest size of a JSON file; an index of some thousand weights has less than a million
# keys of config.json that make libraries convert weights with other packages, or load code from elsewhere
REFUSED = ("quantization_config",)
ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
ADAPTER = "adapter_config.json"


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: The file is not JSON, too large, or too deeply nested.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: expected at most {MAX_BYTES} bytes of JSON, got {path.stat().st_size}")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got a file that can't be read ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty object if there is no such file.

    Raises:
        CheckpointError: The file is not JSON, or its content is not an object.
    """
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def check_model_folder(folder: str | Path) -> None:
    """Refuse a folder whose files name code, or files outside of the folder.

    A name that is not a folder is a hub id and passes, because the hub sends single files of one repository.

    Raises:
        CheckpointError: The folder's index of weights names a file outside the folder, or its configuration names code
            or quantized weights.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    config = read_object(folder / "config.json")
    for key in REFUSED:
        if config.get(key):
            raise CheckpointError(
                f"{folder / 'config.json'}: {key}: expected none, got {config[key]!r}; such models are not supported"
            )
    for key in ATTENTION:
        if "/" in str(config.get(key) or ""):
            raise CheckpointError(
                f"{folder / 'config.json'}: {key}: expected the name of an implementation, got {config[key]!r}"
            )
    for index in folder.glob("*.index.json"):
        names = read_object(index).get("weight_map")
        for name in names.values() if isinstance(names, dict) else ():
            if leads_out(str(name)):
                raise CheckpointError(f"{index}: expected the files of the weights to be inside {folder}, got {name!r}")
