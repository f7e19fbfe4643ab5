"""A model with a vector per token, in the form in which folders store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ranker.encoders.encoder import Encoder


@dataclass
class MultiVectorModel:
    """A bi-encoder with a vector per token.

    Args:
        encoder: The encoder of queries and docs.
        projection: Linear layers from states to vectors, each followed by its activation; None: there are none.
        similarity: `cosine` or `dot`, of two token vectors.
        query_prompt: Text before each query.
        doc_prompt: Text before each doc.
        query_length: Tokens to which shorter queries are extended with `[MASK]`; 0: no expansion.
        attend_to_expansion: Whether other tokens attend to the expansion.
        cut_queries: Whether longer queries are cut to `query_length`.
        skiplist: Words of docs that have no vectors.
        lengths: `query_length`, `document_length` and `max_seq_length`, if the folder has them; set only by reading.
        add_markers: Whether the prompts become special tokens of the tokenizer; set only by reading.
    """

    encoder: Encoder
    projection: nn.Sequential | None
    similarity: str
    query_prompt: str
    doc_prompt: str
    query_length: int
    attend_to_expansion: bool
    cut_queries: bool
    skiplist: list[str]
    lengths: Mapping[str, Any] = field(default_factory=dict)
    add_markers: bool = False
