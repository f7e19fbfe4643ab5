"""Read the file of an offline wandb run, which has records of wandb's protocol in LevelDB's log format."""

import json
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7


def records(path: Path) -> list[Any]:
    """Return all records of a `.wandb` file, in order."""
    data, position, decoded, parts = path.read_bytes(), HEADER, [], b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        length, chunk_type = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if chunk_type in (1, 4):  # the chunk is a whole record, or the last part of one
            decoded.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return decoded


class OfflineRun:
    """The content of an offline run.

    Attributes:
        id: Id of the run.
        name: Display name.
        group: Name of the group, such as the sweep.
        config: Configuration.
        history: Logged entries, each key -> value.
        summary: Last value of each key.
        artifacts: Name -> type and files.
        exit_code: Exit code; None if the run recorded none.
    """

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: dict[str, tuple[str, list[str]]] = {}
        self.exit_code: int | None = None
        for record in records(path):
            record_type = record.WhichOneof("record_type")
            if record_type == "run":
                self.id, self.name, self.group = record.run.run_id, record.run.display_name, record.run.run_group
            elif record_type == "config":
                self.config |= values(record.config.update)
            elif record_type == "history":
                self.history.append(values(record.history.item))
            elif record_type == "summary":
                self.summary |= values(record.summary.update)
            elif record_type == "artifact":
                contents = sorted(entry.path for entry in record.artifact.manifest.contents)
                self.artifacts[record.artifact.name] = (record.artifact.type, contents)
            elif record_type == "exit":
                self.exit_code = record.exit.exit_code

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the points of a curve: (trainer/global_step, value)."""
        return [(entry["trainer/global_step"], entry[name]) for entry in self.history if name in entry]


def values(items: Any) -> dict[str, Any]:
    """Return key -> value; the parts of a nested key are joined by slashes."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
