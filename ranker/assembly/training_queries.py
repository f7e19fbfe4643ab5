"""Find the queries that a ranker was trained on, so that an evaluation or probing on the same queries can warn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranker.assembly.data import load_source
from ranker.checkpoint import read_description
from ranker.config.sets import sets_of
from ranker.config.targets import constructor_keys
from ranker.data.collection import Splits
from ranker.errors import DataError

# sources that may download their data; such a download is not worth a warning about training queries
DOWNLOADING = ("ir_datasets", "msmarco_passage")


def source_name(data: Mapping[str, Any]) -> str:
    """Return the name of a data source's module."""
    return str(data["_target_"]).split(".")[-2]


def seen_in_training(path: Path, data: Any, splits: Splits | None, queries: Mapping[str, set[str]]) -> list[str]:
    """Return warnings about queries that a ranker was trained on, compared by their texts.

    There is also a warning if the ranker's folder does not name its training data, or the data can't be loaded.

    Args:
        path: The ranker's folder.
        data: The `data` node of this command; None if there are several nodes.
        splits: The collections of `data`, which are used if the ranker was trained on the same data.
        queries: Name of a probing task or test set -> the texts of its queries.
    """
    trained = read_description(path).get("data")
    if trained is None:
        return [f"{path.name}: it is not known what it was trained on, so it may have seen these queries"]
    if splits is None or constructor_keys("data", data) != constructor_keys("data", trained):
        try:
            for node in (sets_of(trained) or {"": trained}).values():
                if source_name(node) in DOWNLOADING:
                    raise DataError(f"{source_name(node)} may download it")
            splits = load_source(trained)
        except Exception as error:  # any error here becomes a warning and does not end the run
            reason = (str(error) or repr(error)).splitlines()[0]
            return [f"{path.name}: its training data was not compared ({reason}), so it may have seen these queries"]
    return shared_queries(path.name, splits, queries)


def shared_queries(name: str, splits: Splits, queries: Mapping[str, set[str]]) -> list[str]:
    """Return warnings about queries that a training set contains, compared by their texts.

    Args:
        name: Name of the model that was trained, for the messages.
        splits: The training data.
        queries: Name of a probing task or test set -> the texts of its queries.
    """
    trains = [part.train for part in (splits, *splits.sets.values()) if part.train is not None]
    known = {text for train in trains for text in train.queries.values()}
    warnings = []
    for task, texts in queries.items():
        seen = len(texts & known)
        if seen:
            warnings.append(
                f"{name} was trained on {seen} of the {len(texts)} queries of {task}: read its numbers with care"
            )
    return warnings
