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
from ranker.export._modules import (
    SETTINGS,
    StoredModule,
    has_modules,
    is_multi_vector,
    read_dense,
    read_encoder,
    read_modules,
    write_dense,
    write_encoder,
    write_json,
    write_modules,
)
from ranker.interactions.pooling import POOLINGS

SCORER = "ranker.models.dpr.DPR"
OWN_FILE = "scorer.json"  # the temperature, which sentence-transformers does not have
POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}
PARTS = ("0_Transformer", "1_Pooling", "2_Dense")


def recognises(folder: Path) -> bool:
    """Whether a folder is a bi-encoder of sentence-transformers with one vector per text."""
    return has_modules(folder) and not is_multi_vector(folder)


@dataclass
class Side:
    """The encoder of queries or of docs.

    Args:
        encoder: The encoder.
        projection: Linear layer after pooling, if any.
        lengths: `query_length`, `document_length` and `max_seq_length`, as far as the folder gives them; for reading.
    """

    encoder: Encoder
    projection: nn.Linear | None
    lengths: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SingleVectorModel:
    """A bi-encoder with one vector per text.

    Args:
        query: The encoder of queries.
        doc: The encoder of docs; the same object if queries and docs share all weights.
        pooling: `cls`, `mean` or `max`.
        activation: After the projection: `identity` or `tanh`.
        similarity: `cosine` or `dot`.
        query_prompt: Text before each query.
        doc_prompt: Text before each doc.
        temperature: Divides similarities; its logarithm if `learned`.
        learned: Whether the temperature is trained.
    """

    query: Side
    doc: Side
    pooling: str
    activation: str
    similarity: str
    query_prompt: str = ""
    doc_prompt: str = ""
    temperature: float = 1.0
    learned: bool = False

    @property
    def tied(self) -> bool:
        """Whether queries and docs share all weights."""
        return self.query is self.doc


def write(folder: Path, model: SingleVectorModel, max_tokens: int, max_query_tokens: int | None = None) -> None:
    """Write a folder that sentence-transformers loads; a Router holds two encoders if the model is not tied.

    The temperature goes to `scorer.json`, which that library ignores.

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
        modules = _write_side(folder, ("", *PARTS[1:]), model, model.query, max_tokens, lengths)
    else:
        routes = {}
        for route, side in (("query", model.query), ("document", model.doc)):
            paths = tuple(f"{route}_{part}" for part in PARTS)
            routes[route] = _write_side(folder, paths, model, side, max_tokens, lengths)
        router = {
            "types": {path: name for side in routes.values() for path, name in side},
            "structure": {route: [path for path, _ in side] for route, side in routes.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        write_json(folder / "router_config.json", router)
        modules = [("", "sentence_transformers.models.Router")]
    if model.similarity == "cosine":
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
        write_json(folder / modules[-1][0] / "config.json", {})
    prompts = {"query": model.query_prompt, "document": model.doc_prompt}
    write_modules(folder, modules, prompts, "SentenceTransformer", model.similarity)
    write_json(folder / OWN_FILE, {"temperature": model.temperature, "learned": model.learned})


def _write_side(
    folder: Path,
    paths: tuple[str, ...],
    model: SingleVectorModel,
    side: Side,
    max_tokens: int,
    lengths: Mapping[str, int | None],
) -> list[tuple[str, str]]:
    """Write the modules of queries or of docs; return the path and the class of each."""
    transformer, pooling, dense = paths
    write_encoder(folder / transformer, side.encoder, max_tokens, lengths)
    modes = {key: name == model.pooling for name, key in POOLING_KEYS.items()}
    write_json(folder / pooling / "config.json", {"word_embedding_dimension": side.encoder.dim, **modes})
    modules = [
        (transformer, "sentence_transformers.models.Transformer"),
        (pooling, "sentence_transformers.models.Pooling"),
    ]
    if side.projection is not None:
        write_dense(folder / dense, side.projection, model.activation)
        modules.append((dense, "sentence_transformers.models.Dense"))
    return modules


def read(folder: Path, execution: Execution) -> SingleVectorModel:
    """Read a folder that `write` or sentence-transformers wrote; without `scorer.json` the temperature is 1.

    Raises:
        CheckpointError: The folder has a module or a setting that `SingleVectorModel` can't express.
    """
    chains = read_modules(folder)
    query = _ReadSide(folder, chains["query"], execution)
    doc = query if chains["query"] == chains["document"] else _ReadSide(folder, chains["document"], execution)
    if (query.pooling, query.activation, query.normalized) != (doc.pooling, doc.activation, doc.normalized):
        raise CheckpointError(f"{folder}: expected the same pooling and activation of queries and docs, got two")
    if tokenizer_fingerprint(query.side.encoder.tokenizer) != tokenizer_fingerprint(doc.side.encoder.tokenizer):
        raise CheckpointError(f"{folder}: expected the same tokenizer for queries and docs, got two")
    settings = read_object(folder / SETTINGS)
    similarity = "cosine" if query.normalized else settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise CheckpointError(f"{folder}: expected similarity cosine or dot, got {similarity!r}")
    prompts = settings.get("prompts") or {}
    if not (query.pools_prompt and doc.pools_prompt) and any(prompts.values()):
        raise CheckpointError(
            f"{folder}: expected a Pooling that includes prompts, got include_prompt: false; models that leave prompts "
            "out of the mean are not supported"
        )
    stored = read_object(folder / OWN_FILE)
    learned = stored.get("learned", False)
    return SingleVectorModel(
        query.side,
        doc.side,
        query.pooling,
        query.activation,
        similarity,
        query_prompt=prompts.get("query") or "",
        doc_prompt=prompts.get("document") or "",  # the only key that `encode_document` reads
        temperature=stored["temperature"] if learned else stored.get("temperature", 1.0),
        learned=learned,
    )


class _ReadSide:
    """The modules of queries or of docs, read from a folder."""

    def __init__(self, folder: Path, modules: list[StoredModule], execution: Execution) -> None:
        self.pooling, self.activation, self.normalized, self.pools_prompt = "", "identity", False, True
        if modules[0].name != "Transformer":
            raise CheckpointError(f"{folder}: expected a Transformer first, got {modules[0].name}")
        encoder, lengths = read_encoder(modules[0].folder, execution)
        self.side = Side(encoder, None, lengths)
        for module in modules[1:]:
            if module.name == "Pooling":
                self.pooling, self.pools_prompt = _pooling_of(module), module.config.get("include_prompt", True)
            elif module.name == "Dense" and self.side.projection is None:
                self.side.projection, self.activation = read_dense(module)
            elif module.name == "Normalize":
                self.normalized = True
            else:
                raise CheckpointError(
                    f"{folder}: expected Transformer, Pooling, at most one Dense, Normalize; got {module.name}"
                )
        if not self.pooling:
            raise CheckpointError(
                f"{folder}: expected a Pooling module, got none; a model of token vectors loads as colbert"
            )


def _pooling_of(module: StoredModule) -> str:
    """Return the pooling that a configuration names, in the library's older or newer form."""
    config, names = module.config, {key: name for name, key in POOLING_KEYS.items()}
    if "pooling_mode" in config:
        chosen = [config["pooling_mode"]]
    else:
        chosen = [names.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise CheckpointError(f"{module.folder}: expected one of {', '.join(POOLINGS)} as pooling, got {chosen}")
    return chosen[0]
