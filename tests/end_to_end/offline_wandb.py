"""Read the file of an offline wandb run: records of wandb's own protocol in LevelDB's log format, which wandb reads with a Go program."""

import json
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7


def records(path: Path) -> list[Any]:
    """All records of a `.wandb` file, in order."""
    data, position, found, parts = path.read_bytes(), HEADER, [], b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


class OfflineRun:
    """What a run logged.

    Attributes:
        id: The run's id.
        name: Its name.
        group: Its group.
        config: Its configuration.
        history: Its entries, key -> value.
        summary: Its last values.
        artifacts: Name -> type and files.
        exit_code: How it ended; None where it did not say.
    """

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: dict[str, tuple[str, list[str]]] = {}
        self.exit_code: int | None = None
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.name, self.group = record.run.run_id, record.run.display_name, record.run.run_group
            elif kind == "config":
                self.config |= values(record.config.update)
            elif kind == "history":
                self.history.append(values(record.history.item))
            elif kind == "summary":
                self.summary |= values(record.summary.update)
            elif kind == "artifact":
                contents = sorted(entry.path for entry in record.artifact.manifest.contents)
                self.artifacts[record.artifact.name] = (record.artifact.type, contents)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def curve(self, name: str) -> list[tuple[int, float]]:
        """A curve's points, (trainer/global_step, value)."""
        return [(entry["trainer/global_step"], entry[name]) for entry in self.history if name in entry]


def values(items: Any) -> dict[str, Any]:
    """Keys and values; nested keys with slashes."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
