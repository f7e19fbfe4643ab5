"""Read and write `list_model.json`: options of listwise models, which the formats of other programs can't store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranker.encoders.model_folder import read_object
from ranker.export._modules import write_json

FILE = "list_model.json"
ELSEWHERE = (
    "the scores of this model depend on all docs of a query, but the formats of other programs hold no lists, so other "
    "programs score each doc alone, with other scores; load it with ranker to score lists"
)


def write_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of a list model into its folder."""
    write_json(folder / FILE, options)


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in a folder; empty if it has none."""
    return dict(read_object(folder / FILE))
