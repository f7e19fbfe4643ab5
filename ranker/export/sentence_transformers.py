"""Folders of sentence-transformers' bi-encoders with one vector per text: Transformer, Pooling, Dense, Normalize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ranker.data.token_store import tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import read_encoder, write_encoder
from ranker.export._modules import (
    SETTINGS,
    StoredModule,
    has_modules,
    is_cross_encoder,
    is_multi_vector,
    is_sparse,
    read_modules,
    write_json,
    write_modules,
    write_router,
)
from ranker.export._pooling import pooling_config, read_pooling
from ranker.export._projection import dense_layers, read_projection, write_projection

SCORER = "ranker.models.dpr.DPR"
OWN_FILE = "scorer.json"  # the temperature, which sentence-transformers does not have
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


def recognises(folder: Path) -> bool:
    """Whether a folder is a bi-encoder of sentence-transformers with one vector per text."""
    return has_modules(folder) and not any(test(folder) for test in (is_multi_vector, is_sparse, is_cross_encoder))


@dataclass
class Side:
    """The encoder of queries or of docs.

    Args:
        encoder: The encoder.
        projection: Linear layers after pooling, each followed by its activation; None: there are none.
        lengths: `query_length`, `document_length` and `max_seq_length`, if the folder has them; set only by reading.
    """

    encoder: Encoder
    projection: nn.Sequential | None
    lengths: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SingleVectorModel:
    """A bi-encoder with one vector per text.

    Args:
        query: The encoder of queries.
        doc: The encoder of docs; the same object if queries and docs share all weights.
        pooling: A key of `POOLING_NAMES`.
        similarity: `cosine` or `dot`.
        query_prompt: Text before each query.
        doc_prompt: Text before each doc.
        temperature: Divides similarities; its logarithm if `learned`.
        learned: Whether the temperature is trained.
        pools_prompt: Whether the tokens of a prompt are pooled with those of the text.
    """

    query: Side
    doc: Side
    pooling: str
    similarity: str
    query_prompt: str = ""
    doc_prompt: str = ""
    temperature: float = 1.0
    learned: bool = False
    pools_prompt: bool = True

    @property
    def tied(self) -> bool:
        """Whether queries and docs share all weights."""
        return self.query is self.doc


def write(folder: Path, model: SingleVectorModel, max_tokens: int, max_query_tokens: int | None = None) -> None:
    """Write a folder that sentence-transformers loads; a Router holds two encoders if the model is not tied.

    The temperature is written to `scorer.json`, which sentence-transformers ignores.

    Args:
        folder: Where to write.
        model: The model.
        max_tokens: Longest doc, special tokens included.
        max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
    """
    lengths: dict[str, int | None] = {}
    if max_query_tokens not in (None, max_tokens):
        lengths = {"query_length": max_query_tokens, "document_length": max_tokens}
    if model.tied:
        modules = _write_side(folder, "", model, model.query, max_tokens, lengths)
    else:
        routes = {}
        for route, side in (("query", model.query), ("document", model.doc)):
            routes[route] = _write_side(folder, f"{route}_", model, side, max_tokens, lengths)
        write_router(folder, routes)
        modules = [("", "sentence_transformers.models.Router")]
    if model.similarity == "cosine":
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
        write_json(folder / modules[-1][0] / "config.json", {})
    prompts = {"query": model.query_prompt, "document": model.doc_prompt}
    write_modules(folder, modules, prompts, "SentenceTransformer", model.similarity)
    write_json(folder / OWN_FILE, {"temperature": model.temperature, "learned": model.learned})


def _write_side(
    folder: Path,
    prefix: str,
    model: SingleVectorModel,
    side: Side,
    max_tokens: int,
    lengths: Mapping[str, int | None],
) -> list[tuple[str, str]]:
    """Write the modules of queries or of docs; return the path and the class of each."""
    transformer, pooling = f"{prefix}0_Transformer" if prefix else "", f"{prefix}1_Pooling"
    write_encoder(folder / transformer, side.encoder, max_tokens, lengths)
    pooled = pooling_config(side.encoder.dim, model.pooling, model.pools_prompt)
    write_json(folder / pooling / "config.json", pooled)
    dense = write_projection(folder, 2, side.projection, prefix)
    return [
        (transformer, "sentence_transformers.models.Transformer"),
        (pooling, "sentence_transformers.models.Pooling"),
        *((path, "sentence_transformers.models.Dense") for path in dense),
    ]


def read(folder: Path, execution: Execution) -> SingleVectorModel:
    """Read a folder that `write` or sentence-transformers wrote; without `scorer.json` the temperature is 1.

    Raises:
        CheckpointError: The folder has a module or a setting that `SingleVectorModel` can't express.
    """
    chains = read_modules(folder)
    query = _ReadSide(folder, chains["query"], execution)
    doc = query if chains["query"] == chains["document"] else _ReadSide(folder, chains["document"], execution)
    if query.settings != doc.settings:
        raise CheckpointError(
            f"{folder}: expected the same pooling, prompts and size of vectors for queries and docs, got "
            f"{query.settings} and {doc.settings}"
        )
    if tokenizer_fingerprint(query.side.encoder.tokenizer) != tokenizer_fingerprint(doc.side.encoder.tokenizer):
        raise CheckpointError(f"{folder}: expected the same tokenizer for queries and docs, got two")
    settings = read_object(folder / SETTINGS)
    similarity = "cosine" if query.normalized else settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise CheckpointError(f"{folder}: expected similarity cosine or dot, got {similarity!r}")
    prompts = settings.get("prompts") or {}
    stored = read_object(folder / OWN_FILE)
    learned = stored.get("learned", False)
    return SingleVectorModel(
        query.side,
        doc.side,
        query.pooling,
        similarity,
        query_prompt=prompts.get("query") or "",
        doc_prompt=prompts.get("document") or "",  # the only key that `encode_document` reads
        temperature=stored["temperature"] if learned else stored.get("temperature", 1.0),
        learned=learned,
        pools_prompt=query.pools_prompt,
    )


def parts_beside_encoder(folder: Path) -> dict[str, str]:
    """Describe the parts beside the encoder in a folder of sentence-transformers, of any model type.

    Returns:
        Name of the part (`pooling`, `Dense`, `Normalize`, `prompts`, or the class of another module) -> description.
        Empty for other folders.
    """
    if not has_modules(folder):
        return {}
    parts: dict[str, str] = {}
    for module in read_modules(folder)["document"][1:]:
        if module.name == "Pooling":
            parts["pooling"] = read_pooling(module)
        elif module.name == "Dense":
            sizes = " to ".join(str(module.config.get(key)) for key in ("in_features", "out_features"))
            parts["Dense"] = ", ".join([parts["Dense"], sizes] if "Dense" in parts else [sizes])
        else:
            parts[module.name] = ""
    prompts = read_object(folder / SETTINGS).get("prompts") or {}
    named = {name: text for name, text in prompts.items() if text}
    return {**parts, **({"prompts": ", ".join(f"{name} {text!r}" for name, text in named.items())} if named else {})}


class _ReadSide:
    """The modules of queries or of docs, read from a folder."""

    def __init__(self, folder: Path, modules: list[StoredModule], execution: Execution) -> None:
        names = [module.name for module in modules]
        places = [ORDER.index(name) for name in names if name in ORDER]
        if len(places) < len(names) or places != sorted(places) or any(places.count(i) != 1 for i in (0, 1)):
            missing = "; a model of token vectors loads as colbert" if "Pooling" not in names else ""
            raise CheckpointError(
                f"{folder}: expected the modules Transformer, Pooling, [Dense], [Normalize] in this order (those in "
                f"brackets are optional), got {', '.join(names)}{missing}"
            )
        encoder, lengths = read_encoder(modules[0].folder, execution)
        projection = read_projection(modules)
        self.side = Side(encoder, projection, lengths)
        self.pooling, self.normalized = read_pooling(modules[1]), "Normalize" in names
        self.pools_prompt = bool(modules[1].config.get("include_prompt", True))
        layers = list(dense_layers(projection))
        size = layers[-1][0].out_features if layers else encoder.dim
        self.settings = (self.pooling, self.normalized, self.pools_prompt, size)
