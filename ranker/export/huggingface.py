"""Sequence classification models of transformers: one folder without modules.json."""

from __future__ import annotations

from pathlib import Path

from ranker.export import _sequence_classification as sequence_classification
from ranker.export import language_model, sequence_to_sequence
from ranker.export._modules import has_modules, is_stanford

SCORER = "ranker.models.monobert.MonoBERT"
read, write = sequence_classification.read, sequence_classification.write


def recognises(folder: Path) -> bool:
    """Whether a folder holds a single transformers model, a reranker or not; `read` refuses one without a head."""
    generates = language_model.recognises(folder) or sequence_to_sequence.recognises(folder)
    return (folder / "config.json").is_file() and not (has_modules(folder) or is_stanford(folder) or generates)
