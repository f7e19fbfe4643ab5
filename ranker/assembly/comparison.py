"""Find the run files, the judgements and the texts of each set for `ranker compare`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_qrels
from ranker.errors import ConfigError, DataError
from ranker.evaluation.run_files import EVALUATION, listed, runs_of
from ranker.evaluation.suite import QRELS
from ranker.reports.content import Texts

if TYPE_CHECKING:  # ranker.types imports torch
    from ranker.types import Qrels

_STAMP = re.compile(r"\d{4}-\d\d-\d\d_")  # start of a run folder's name


@dataclass(frozen=True)
class Judged:
    """Judgements of a set, and its texts if they are known."""

    qrels: Qrels
    relevance: int
    texts: Texts | None


def labels_of(cfg: DictConfig, paths: Sequence[Path]) -> list[str]:
    """Return a different label for each run: the given ones, or names from the paths.

    Raises:
        ConfigError: The number of labels differs from that of the runs, or two labels are equal.
    """
    if cfg.labels is not None:
        labels = listed("labels", cfg.labels)
        if len(labels) != len(paths) or len(set(labels)) < len(labels):
            raise ConfigError(f"labels: expected {len(paths)} different names, got {labels}")
        return labels
    short = [_short_name(path) for path in paths]
    if len(set(short)) == len(short):
        return short
    longer = [f"{path.parent.name}/{path.name}" for path in paths]
    return longer if len(set(longer)) == len(longer) else [f"{i}: {name}" for i, name in enumerate(longer, 1)]


def _short_name(path: Path) -> str:
    """Return a file's name without endings, NAME for a run folder `NAME/STAMP`, and `NAME/JOB` for a sweep's job."""
    if not path.is_dir():
        return path.name.split(".")[0] or path.name
    if _STAMP.match(path.parent.name):
        return f"{path.parent.parent.name}/{path.name}"
    return path.parent.name if _STAMP.match(path.name) else path.name


def files_of_sets(cfg: DictConfig, paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Return set name -> run files, one for each path, for the sets that all runs have.

    A plain run file does not say its set, so it can be compared on any set, but only on a single one.

    Raises:
        ConfigError: A path has no run, no set is common to all runs, or `sets` names a set that is not common to all.
    """
    found = [runs_of(path) for path in paths]
    for path, files in zip(paths, found, strict=True):
        if not files:
            raise ConfigError(f"runs: expected a TREC run or a run folder with runs, got {path} without any")
    named = [set(files) for files in found if "" not in files]
    common = [name for name in (dict.fromkeys(name for files in found for name in files)) if name]
    common = [name for name in common if all(name in names for names in named)] if named else [""]
    if cfg.sets is not None:
        wanted = listed("sets", cfg.sets, least=1, most=1000)
        missing = [name for name in wanted if name not in common]
        if missing and named:
            raise ConfigError(f"sets: expected sets that all runs have ({', '.join(common)}), got {', '.join(missing)}")
        common = wanted if not named else [name for name in common if name in wanted]
    if not common:
        raise ConfigError(f"runs: expected runs of the same set, got {'; '.join(', '.join(files) for files in found)}")
    if len(common) > 1 and (len(named) < len(found) or cfg.qrels is not None):
        raise ConfigError(
            f"sets: expected the name of one set, since a plain run file or qrels= is for a single set, got "
            f"{', '.join(common)}"
        )
    return {name: [files.get(name) or files[""] for files in found] for name in common}


def judgements(cfg: DictConfig, paths: Sequence[Path], names: Sequence[str]) -> dict[str, Judged]:
    """Return judgements and texts of each set.

    Judgements come from `qrels=` if it is set. Otherwise they come from the run folder of a suite or from the data.

    Raises:
        ConfigError: There are no judgements.
    """
    if cfg.qrels is not None:
        texts = None
        if cfg.queries is not None and cfg.docs is not None:
            texts = Texts(read_queries(Path(cfg.queries)), JsonlDocs(Path(cfg.docs)))
        return dict.fromkeys(names, Judged(read_qrels(Path(cfg.qrels)), cfg.relevance, texts))
    folders = [path for path in paths if path.is_dir()]
    stored = [folder for folder in folders if all((folder / EVALUATION / name / QRELS).is_file() for name in names)]
    if cfg.data is None and stored:
        return {
            name: Judged(read_qrels(stored[0] / EVALUATION / name / QRELS), _relevance(stored[0], name), None)
            for name in names
        }
    return _of_data(cfg, folders, names)


def _relevance(folder: Path, name: str) -> int:
    """Return the smallest relevant grade of a set of a suite, from `suite.json`.

    Raises:
        DataError: The file is missing or broken.
    """
    path = folder / "suite.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["sets"][name]["relevance"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected the relevance of the set {name}, got {error!r}; set qrels=FILE") from error


def _of_data(cfg: DictConfig, folders: Sequence[Path], names: Sequence[str]) -> dict[str, Judged]:
    """Return judgements and texts of `data=`, or of the data of the first run folder."""
    from ranker.assembly.data import chosen_sets, load_source, print_notice  # imports torch

    node = cfg.data if cfg.data is not None else next(filter(None, map(_data_of, folders)), None)
    if node is None:
        raise ConfigError("qrels: expected judgements for these runs, got none; set qrels=FILE or data=...")
    loaded = load_source(node, cfg.cache_dir)
    print_notice(loaded)
    sets: Mapping[str, Any] = chosen_sets(loaded, cfg.split)
    if list(names) == [""] and len(sets) == 1:
        sets = {"": next(iter(sets.values()))}
    missing = [name for name in names if name not in sets]
    if missing:
        raise ConfigError(
            f"data: expected data with the sets of the runs ({', '.join(names)}), got {', '.join(sets)}; set data=... "
            "or sets"
        )
    return {
        name: Judged(dict(sets[name].qrels), sets[name].relevance, Texts(sets[name].queries, sets[name].docs))
        for name in names
    }


def _data_of(folder: Path) -> Any:
    """Return the data node of a run folder; None if its configuration has none."""
    from ranker.checkpoint import read_description
    from ranker.config.stored import load_stored

    if not (folder / "config.yaml").is_file():
        return None
    cfg = load_stored(folder / "config.yaml")
    if cfg.get("data") is None and cfg.get("checkpoint"):
        return (read_description(Path(cfg.checkpoint)) or {}).get("data")
    return cfg.get("data")
