"""Folders of sentence-transformers' sparse encoders: Transformer with a masked language model, SpladePooling.

Queries without an encoder have a SparseStaticEmbedding in a Router. A masked language model of transformers without
modules.json is read as sentence-transformers reads it: with max pooling for queries and docs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ranker.data.token_store import tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.masked_lm import MaskedLMHead
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import read_encoder, read_weights, write_tokenizer
from ranker.export._modules import (
    SETTINGS,
    StoredModule,
    has_modules,
    is_masked_lm,
    is_sparse,
    read_modules,
    write_json,
    write_modules,
    write_router,
)

log = logging.getLogger(__name__)

SCORER = "ranker.models.splade.SPLADE"
CLASSES = "sentence_transformers.sparse_encoder.modules"
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
POOLING = f"{CLASSES}.splade_pooling.SpladePooling"
STATIC = f"{CLASSES}.sparse_static_embedding.SparseStaticEmbedding"
# settings with which sentence-transformers' Transformer returns the logits of all words
FILL_MASK = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}


def recognises(folder: Path) -> bool:
    """Whether a folder is a sparse encoder of sentence-transformers, or a masked language model of transformers."""
    return is_sparse(folder) or is_masked_lm(folder)


@dataclass
class Side:
    """The encoder of queries or of docs.

    Args:
        encoder: The encoder.
        head: The head of its masked language model.
        lengths: `query_length`, `document_length` and `max_seq_length`, if the folder has them; set only by reading.
    """

    encoder: Encoder
    head: MaskedLMHead
    lengths: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SparseModel:
    """A sparse encoder.

    Args:
        query: The encoder of queries; if queries have no encoder, that of docs.
        doc: The encoder of docs; the same object if queries and docs share all weights.
        pooling: `max` or `sum`.
        activation: `relu` or `log1p_relu`.
        query_prompt: Text before each query.
        doc_prompt: Text before each doc.
        query_weights: Weight of each token of a query, [words]; None: an encoder computes them.
        frozen: Whether these weights are not trained.
    """

    query: Side
    doc: Side
    pooling: str
    activation: str
    query_prompt: str = ""
    doc_prompt: str = ""
    query_weights: Tensor | None = None
    frozen: bool = False

    @property
    def tied(self) -> bool:
        """Whether queries and docs share all weights."""
        return self.query is self.doc


def write(folder: Path, model: SparseModel, max_tokens: int, max_query_tokens: int | None = None) -> None:
    """Write a folder that sentence-transformers loads; a Router holds the two sides if the model is not tied.

    Args:
        folder: Where to write.
        model: The model.
        max_tokens: Longest doc, special tokens included.
        max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
    """
    lengths: dict[str, int | None] = {}
    if max_query_tokens not in (None, max_tokens):
        lengths = {"query_length": max_query_tokens, "document_length": max_tokens}
    if model.tied and model.query_weights is None:
        modules = _write_side(folder, "", model, model.query, max_tokens, lengths)
    else:
        if model.query_weights is None:
            query = _write_side(folder, "query_", model, model.query, max_tokens, lengths)
        else:
            query = _write_static(folder, model, max_query_tokens or max_tokens)
        routes = {"query": query, "document": _write_side(folder, "document_", model, model.doc, max_tokens, lengths)}
        write_router(folder, routes)
        modules = [("", "sentence_transformers.base.modules.router.Router")]
    write_modules(folder, modules, {"query": model.query_prompt, "document": model.doc_prompt}, "SparseEncoder", "dot")


def _write_side(
    folder: Path, prefix: str, model: SparseModel, side: Side, max_tokens: int, lengths: Mapping[str, int | None]
) -> list[tuple[str, str]]:
    """Write the modules of queries or of docs; return the path and the class of each."""
    transformer, pooling = f"{prefix}0_Transformer" if prefix else "", f"{prefix}1_SpladePooling"
    place = folder / transformer
    place.mkdir(parents=True, exist_ok=True)
    side.head.save(place, side.encoder.model)
    write_tokenizer(place, side.encoder, max_tokens)
    write_json(
        place / "sentence_bert_config.json",
        {"max_seq_length": max_tokens, "do_lower_case": False, **FILL_MASK, **lengths},
    )
    config = {
        "pooling_strategy": model.pooling,
        "activation_function": model.activation,
        "embedding_dimension": len(side.head.weight),
    }
    write_json(folder / pooling / "config.json", config)
    return [(transformer, TRANSFORMER), (pooling, POOLING)]


def _write_static(folder: Path, model: SparseModel, max_query_tokens: int) -> list[tuple[str, str]]:
    """Write the weights of query tokens."""
    assert model.query_weights is not None
    place = folder / "query_0_SparseStaticEmbedding"
    place.mkdir(parents=True, exist_ok=True)
    # sentence-transformers adds no special tokens to such queries
    special = model.query.encoder.tokenizer.num_special_tokens_to_add(pair=False)
    write_tokenizer(place, model.query.encoder, max(1, max_query_tokens - special))
    write_json(place / "config.json", {"frozen": model.frozen})
    save_file({"weight": model.query_weights.float().contiguous().cpu()}, place / "model.safetensors")
    return [(place.name, STATIC)]


def read(folder: Path, execution: Execution) -> SparseModel:
    """Read a folder that `write` or sentence-transformers wrote, or a masked language model of transformers.

    Raises:
        CheckpointError: The folder has a module or a setting that `SparseModel` can't express.
    """
    if not has_modules(folder):
        log.warning("%s: a masked language model; it is read as a SPLADE with max pooling", folder)
        side = _read_side(folder, execution)
        return SparseModel(side, side, "max", "relu")
    chains = read_modules(folder)
    doc_pooling = _pooling_of(folder, chains["document"])
    prompts = read_object(folder / SETTINGS).get("prompts") or {}
    settings = (*doc_pooling, prompts.get("query") or "", prompts.get("document") or "")
    similarity = read_object(folder / SETTINGS).get("similarity_fn_name")
    if similarity not in (None, "dot"):
        raise CheckpointError(f"{folder}: similarity_fn_name: expected dot, got {similarity!r}")
    doc = _read_side(chains["document"][0].folder, execution)
    if [module.name for module in chains["query"]] == ["SparseStaticEmbedding"]:
        static = chains["query"][0]
        if static.config.get("path"):
            raise CheckpointError(
                f"{static.folder}: expected the weights of query tokens in model.safetensors, got path="
                f"{static.config['path']!r}; load and save the model with sentence-transformers once"
            )
        weights = read_weights(static.folder).get("weight")
        if weights is None or weights.shape != (len(doc.head.weight),):
            raise CheckpointError(
                f"{static.folder}: expected a weight for each of {len(doc.head.weight)} words, got "
                f"{'none' if weights is None else tuple(weights.shape)}"
            )
        frozen = bool(static.config.get("frozen"))
        return SparseModel(doc, doc, *settings, weights, frozen)
    if chains["query"] == chains["document"]:
        return SparseModel(doc, doc, *settings)
    query_pooling = _pooling_of(folder, chains["query"])
    if query_pooling != doc_pooling:
        raise CheckpointError(
            f"{folder}: expected the same pooling for queries and docs, got {query_pooling} and {doc_pooling}"
        )
    query = _read_side(chains["query"][0].folder, execution)
    if tokenizer_fingerprint(query.encoder.tokenizer) != tokenizer_fingerprint(doc.encoder.tokenizer):
        raise CheckpointError(f"{folder}: expected the same tokenizer for queries and docs, got two")
    return SparseModel(query, doc, *settings)


def _pooling_of(folder: Path, chain: list[StoredModule]) -> tuple[str, str]:
    """Return pooling and activation of a side."""
    names = [module.name for module in chain]
    if names not in (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        raise CheckpointError(f"{folder}: expected the modules Transformer and SpladePooling, got {', '.join(names)}")
    config = chain[1].config
    return config.get("pooling_strategy", "max"), config.get("activation_function", "relu")


def _read_side(folder: Path, execution: Execution) -> Side:
    """Read an encoder and the head beside it."""
    encoder, lengths = read_encoder(folder, execution)
    encoder.source = str(folder)
    head = MaskedLMHead(encoder)
    encoder.source = None  # as for all loaded models, because its weights are saved with the model
    return Side(encoder, head, lengths)
