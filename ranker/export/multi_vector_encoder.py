"""Read and write folders of MultiVectorEncoder (sentence-transformers 6.0 or later), with one vector per token."""

from __future__ import annotations

from pathlib import Path

from ranker.encoders.execution import Execution
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import read_encoder, write_encoder
from ranker.export._modules import SETTINGS, has_modules, is_multi_vector, read_modules, write_json, write_modules
from ranker.export._multi_vector import MultiVectorModel
from ranker.export._projection import read_projection, write_projection

SCORER = "ranker.models.colbert.ColBERT"
TOKENS = {"module_input_name": "token_embeddings"}
KNOWN = {"Dense", "MultiVectorMask", "Normalize"}


def recognises(folder: Path) -> bool:
    """Whether a folder is a MultiVectorEncoder of sentence-transformers."""
    return has_modules(folder) and is_multi_vector(folder)


def write(folder: Path, model: MultiVectorModel, max_tokens: int, max_query_tokens: int | None = None) -> None:
    """Write a folder that sentence-transformers loads.

    Args:
        folder: Where to write.
        model: The model.
        max_tokens: Longest doc, special tokens included.
        max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
    """
    expansion = {
        "strategy": "fixed" if model.cut_queries else "min",
        "attend": model.attend_to_expansion,
        "token": None,
        "length": model.query_length,
    }
    lengths = {"document_length": max_tokens, "query_expansion": expansion if model.query_length else None}
    if not model.cut_queries:
        lengths = {"query_length": max(max_query_tokens or max_tokens, model.query_length), **lengths}
    write_encoder(folder, model.encoder, max_tokens, lengths)
    modules = [("", "sentence_transformers.base.modules.transformer.Transformer")]
    for path in write_projection(folder, 1, model.projection, extra=TOKENS):
        modules.append((path, "sentence_transformers.base.modules.dense.Dense"))
    mask = f"{len(modules)}_MultiVectorMask"
    write_json(folder / mask / "config.json", {"skiplist_words": model.skiplist, "skiplist_tasks": ["document"]})
    modules.append((mask, "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"))
    if model.similarity == "cosine":
        normalize = f"{len(modules)}_Normalize"
        write_json(folder / normalize / "config.json", TOKENS)
        modules.append((normalize, "sentence_transformers.base.modules.normalize.Normalize"))
    prompts = {"query": model.query_prompt, "document": model.doc_prompt}
    write_modules(folder, modules, prompts, "MultiVectorEncoder", "maxsim")


def read(folder: Path, execution: Execution) -> MultiVectorModel:
    """Read a folder that `write` or sentence-transformers wrote.

    Raises:
        CheckpointError: The folder has a module or a setting that `MultiVectorModel` can't express.
    """
    chain = read_modules(folder)["query"]
    names = [module.name for module in chain]
    if names[0] != "Transformer" or "MultiVectorMask" not in names or set(names[1:]) - KNOWN:
        raise CheckpointError(
            f"{folder}: expected the modules Transformer, [Dense], MultiVectorMask, [Normalize] (those in brackets are "
            f"optional), got {', '.join(names)}"
        )
    encoder, lengths = read_encoder(chain[0].folder, execution)
    by_name = {module.name: module for module in chain}
    projection = read_projection(chain)
    mask = by_name["MultiVectorMask"].config
    skiplist = mask.get("skiplist_words") or []
    expansion = lengths.get("query_expansion") or {}
    settings = read_object(folder / SETTINGS)
    unsupported = {
        "skiplist_tasks": mask.get("skiplist_tasks", ["document"]) != ["document"] and bool(skiplist),
        "keep_only_token_ids": bool(mask.get("keep_only_token_ids")),
        "an expansion token other than the mask token": bool(expansion.get("token")),
        "similarity_fn_name": settings.get("similarity_fn_name") not in (None, "maxsim"),
    }
    if any(unsupported.values()):
        reasons = ", ".join(reason for reason, present in unsupported.items() if present)
        raise CheckpointError(f"{folder}: {reasons}: not supported by model=colbert")
    prompts = settings.get("prompts") or {}
    return MultiVectorModel(
        encoder,
        projection,
        similarity="cosine" if "Normalize" in by_name else "dot",
        # markers are used as they are: if the folder's tokenizer splits a marker, sentence-transformers splits it, too
        query_prompt=prompts.get("query") or "",
        doc_prompt=prompts.get("document") or "",
        query_length=expansion["length"] if expansion else 0,
        attend_to_expansion=bool(expansion.get("attend")),
        cut_queries=bool(expansion and expansion["strategy"] == "fixed"),
        skiplist=skiplist,
        lengths=lengths,
    )
