"""Checkpoints of Stanford ColBERT: `HF_ColBERT` in config.json, options in artifact.metadata; read, never written."""

from __future__ import annotations

import json
import string
from pathlib import Path

from torch import nn

from ranker.encoders.execution import Execution
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import linear_of, read_encoder, read_weights
from ranker.export._modules import has_modules, is_stanford
from ranker.export._multi_vector import MultiVectorModel

SCORER = "ranker.models.colbert.ColBERT"


def recognises(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Stanford ColBERT."""
    return is_stanford(folder) and not has_modules(folder)


def read(folder: Path, execution: Execution) -> MultiVectorModel:
    """Read a checkpoint.

    Raises:
        CheckpointError: The folder is not such a checkpoint, or has another similarity than cosine.
    """
    if not is_stanford(folder):
        raise CheckpointError(
            f"{folder}: expected modules.json, or config.json with the architecture HF_ColBERT; got neither"
        )
    metadata = read_object(folder / "artifact.metadata")
    if metadata.get("similarity", "cosine") != "cosine":
        raise CheckpointError(f"{folder}: similarity: expected cosine, got {metadata['similarity']!r}")
    encoder, _ = read_encoder(folder, execution)
    weights = read_weights(folder)
    if "linear.weight" not in weights:
        raise CheckpointError(
            f"{folder}: expected the projection linear.weight among the weights, got "
            f"{json.dumps(sorted(weights)[:3])} ..."
        )
    markers = [metadata.get("query_token_id") or "[unused0]", metadata.get("doc_token_id") or "[unused1]"]
    vocabulary = encoder.tokenizer.get_vocab()
    for marker in markers:
        if marker not in vocabulary:
            raise CheckpointError(
                f"{folder}: expected its marker {marker!r} in the vocabulary of its tokenizer, got none"
            )
    return MultiVectorModel(
        encoder,
        nn.Sequential(linear_of(weights["linear.weight"], None), nn.Identity()),
        similarity="cosine",
        query_prompt=markers[0],
        doc_prompt=markers[1],
        query_length=metadata.get("query_maxlen") or 32,
        attend_to_expansion=bool(metadata.get("attend_to_mask_tokens")),
        cut_queries=True,
        skiplist=list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
        lengths={"document_length": metadata.get("doc_maxlen")},
        add_markers=True,
    )
