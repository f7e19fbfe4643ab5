"""Sequence classification models of transformers: one folder without modules.json."""

from __future__ import annotations

from pathlib import Path

from ranker.export import _sequence_classification as sequence_classification
from ranker.export import language_model, sequence_to_sequence
from ranker.export._modules import has_modules, is_masked_lm, is_stanford

SCORER = "ranker.models.monobert.MonoBERT"
read, write = sequence_classification.read, sequence_classification.write


def recognises(folder: Path) -> bool:
    """Whether a folder has a single transformers model; `read` refuses it if it is not a reranker."""
    others = (has_modules, is_stanford, is_masked_lm, language_model.recognises, sequence_to_sequence.recognises)
    return (folder / "config.json").is_file() and not any(test(folder) for test in others)
