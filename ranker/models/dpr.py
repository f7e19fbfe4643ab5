"""DPR: a query and a doc are one vector each, compared by dot product or cosine (Karpukhin et al., 2020, arXiv:2004.04906)."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.data.template import Template
from ranker.data.token_store import tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError, ConfigError
from ranker.export import sentence_transformers as layout
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors, full_precision
from ranker.interactions.pooling import POOLINGS
from ranker.types import RankBatch, TokenBatch

SIMILARITIES = ("cosine", "dot")
LEAST_TEMPERATURE = 0.01  # a learned one stops here, as in CLIP: sharper softmaxes overflow


class DPR(nn.Module):
    r"""Score a query and a doc by the similarity of their vectors.

    .. math:: s(q, d) = \mathrm{sim}(E_q(q), E_d(d)) / \tau

    Args:
        encoder: The encoder of queries, and of docs if `tied`; else docs start with a copy of it.
        pooling: How token states become a vector: `cls`, `mean` or `max`.
        tied: Whether queries and docs share all weights.
        similarity: `cosine` or `dot`.
        temperature: What similarities are divided by; must be positive.
        learn_temperature: Whether it is trained (never below 0.01).
        projection: Size of a linear layer after pooling; None: no such layer.
        activation: After the projection: `identity` or `tanh`.
        query_prompt: Text before each query, tokenized together with it; a special token of the tokenizer stays one.
        doc_prompt: The same before each doc.
        in_batch_negatives: Whether, in training, the docs of a step's other queries are negatives; None: unless labels
            are a teacher's scores.
        symmetric: Whether each positive doc is also set against the step's other queries.
    """

    reads = "texts"

    def __init__(
        self,
        encoder: Encoder,
        pooling: str = "mean",
        tied: bool = True,
        similarity: str = "cosine",
        temperature: float = 0.05,
        learn_temperature: bool = False,
        projection: int | None = None,
        activation: str = "identity",
        query_prompt: str = "",
        doc_prompt: str = "",
        in_batch_negatives: bool | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__()
        for key, value, known in (("pooling", pooling, POOLINGS), ("similarity", similarity, SIMILARITIES), ("activation", activation, layout.ACTIVATIONS)):  # fmt: skip
            if value not in known:
                raise ConfigError(f"model.{key}: expected one of {', '.join(known)}; got {value!r}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"model.temperature: expected a finite number above 0, got {temperature}")
        check_layout(encoder, 1, pooling)
        self.encoder, self.pooling, self.similarity, self.activation = encoder, pooling, similarity, activation
        self.query_prompt, self.doc_prompt = query_prompt, doc_prompt
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.fixed_temperature = temperature
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature))) if learn_temperature else None
        self.projection = _projection(encoder, projection) if projection is not None else None
        self.doc_encoder = None if tied else copy.deepcopy(encoder)
        self.doc_projection = None if tied else copy.deepcopy(self.projection)
        self.text_limits: tuple[int, int] | None = (
            None  # longest query and doc without special tokens, where the loaded folder says so
        )

    @property
    def tied(self) -> bool:
        """Whether queries and docs share all weights."""
        return self.doc_encoder is None

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.projection.out_features if self.projection is not None else self.encoder.dim

    def layouts(self) -> tuple[Template, Template]:
        """How a query and a doc are laid out."""
        single = Template.of(self.encoder.tokenizer, 1)
        tokenizer = self.encoder.tokenizer
        return layout.with_prompt(tokenizer, single, self.query_prompt), layout.with_prompt(
            tokenizer, single, self.doc_prompt
        )

    def settings(self) -> dict[str, Any]:
        """What decides the vectors beside weights and tokenizer; an index remembers its hash."""
        return {
            "scorer": "dpr",
            "pooling": self.pooling,
            "similarity": self.similarity,
            "activation": self.activation,
            "tied": self.tied,
            "layouts": repr(self.layouts()),
        }

    # vectors and scores
    # ---------------------------------------------------------------------------------------------------------------

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """One vector per query."""
        return self._encode(batch, self.encoder, self.projection)

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """One vector per doc."""
        return self._encode(
            batch, self.doc_encoder or self.encoder, self.projection if self.tied else self.doc_projection
        )

    def _encode(self, batch: TokenBatch, encoder: Encoder, projection: nn.Linear | None) -> TextVectors:
        pooled = encoder.pooled(batch, self.pooling)
        if projection is not None:
            pooled = projection(pooled)
            pooled = pooled.tanh() if self.activation == "tanh" else pooled
        vectors = full_precision(pooled)
        return TextVectors(functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors)

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs]."""
        with torch.autocast(queries.values.device.type, enabled=False):
            return queries.values @ docs.values.T / self.divisor()

    def scoring_parameters(self) -> list[nn.Parameter]:
        """Parameters that `score_block` reads beside the vectors."""
        return [] if self.log_temperature is None else [self.log_temperature]

    def divisor(self) -> Tensor | float:
        """The temperature, that similarities are divided by."""
        if self.log_temperature is None:
            return self.fixed_temperature
        limited = self.log_temperature.clamp(min=math.log(LEAST_TEMPERATURE))
        # the gradient passes the limit, or what once overshot would stay there for good
        return (self.log_temperature + (limited - self.log_temperature).detach()).exp()

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with its own docs; 0 where no doc is."""
        assert batch.queries is not None and batch.docs is not None
        queries, docs = self.encode_queries(batch.queries), self.encode_docs(batch.docs)
        owners = batch.doc_mask.nonzero_static(size=batch.docs.num_rows)[:, 0]
        with torch.autocast(docs.values.device.type, enabled=False):
            scores = (queries.values.index_select(0, owners) * docs.values).sum(1) / self.divisor()
        return to_grid(scores, batch.doc_mask)

    # the sentence-transformers folder
    # ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write sentence-transformers' layout: Transformer, Pooling, Dense, Normalize; two of each behind a Router if not tied.

        That library's similarities have no temperature; it is kept in `scorer.json`.

        Args:
            folder: Where to.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
        """
        extra = (
            {}
            if max_query_tokens in (None, max_tokens)
            else {"query_length": max_query_tokens, "document_length": max_tokens}
        )
        normalize = [("Normalize", "sentence_transformers.models.Normalize")] if self.similarity == "cosine" else []
        if self.tied:
            names = self._write_side(
                folder, ("", "1_Pooling", "2_Dense"), self.encoder, self.projection, max_tokens, extra
            )
        else:
            routes = {
                "query": self._write_side(
                    folder,
                    tuple(f"query_{part}" for part in ("0_Transformer", "1_Pooling", "2_Dense")),
                    self.encoder,
                    self.projection,
                    max_tokens,
                    extra,
                ),
                "document": self._write_side(
                    folder,
                    tuple(f"document_{part}" for part in ("0_Transformer", "1_Pooling", "2_Dense")),
                    self.doc_encoder,
                    self.doc_projection,
                    max_tokens,
                    extra,
                ),
            }
            layout.write_json(folder / "router_config.json", {
                "types": {path: name for side in routes.values() for path, name in side},
                "structure": {route: [path for path, _ in side] for route, side in routes.items()},
                "parameters": {"default_route": "document", "allow_empty_key": True},
            })  # fmt: skip
            names = [("", "sentence_transformers.models.Router")]
        modules = [*names, *((f"{len(names)}_{name}", kind) for name, kind in normalize)]
        for path, _ in modules[len(names) :]:
            layout.write_json(folder / path / "config.json", {})
        layout.write_modules(
            folder,
            modules,
            {"query": self.query_prompt, "document": self.doc_prompt},
            "SentenceTransformer",
            self.similarity,
        )
        learned = self.log_temperature is not None
        temperature = (
            float(self.log_temperature.detach()) if self.log_temperature is not None else self.fixed_temperature
        )
        layout.write_json(folder / "scorer.json", {"temperature": temperature, "learned": learned})

    def _write_side(
        self, folder: Path, paths: tuple[str, ...], encoder: Encoder | None, projection: nn.Linear | None, max_tokens: int, extra: dict[str, int]
    ) -> list[tuple[str, str]]:  # fmt: skip
        """Write one side's modules; returns their paths and classes."""
        assert encoder is not None
        layout.write_encoder(folder / paths[0], encoder, max_tokens, extra)
        modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}
        layout.write_json(
            folder / paths[1] / "config.json",
            {"word_embedding_dimension": encoder.dim, **{key: how == self.pooling for how, key in modes.items()}},
        )
        names = [
            (paths[0], "sentence_transformers.models.Transformer"),
            (paths[1], "sentence_transformers.models.Pooling"),
        ]
        if projection is not None:
            layout.write_dense(folder / paths[2], projection, self.activation)
            names.append((paths[2], "sentence_transformers.models.Dense"))
        return names

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> DPR:
        """Load a folder in sentence-transformers' layout, written by `save` or by that library; without `scorer.json` the temperature is 1.

        Raises:
            CheckpointError: A module or a setting that this model has not.
        """
        sides = layout.read_modules(folder)
        tied = sides["query"] == sides["document"]
        query, doc = (
            (_Side(folder, sides[name], execution) for name in ("query", "document"))
            if not tied
            else (_Side(folder, sides["query"], execution),) * 2
        )
        if (query.pooling, query.activation, query.normalized) != (doc.pooling, doc.activation, doc.normalized):
            raise CheckpointError(f"{folder}: expected the same pooling and activation of queries and docs, got two")
        if tokenizer_fingerprint(query.encoder.tokenizer) != tokenizer_fingerprint(doc.encoder.tokenizer):
            raise CheckpointError(f"{folder}: expected the same tokenizer for queries and docs, got two")
        config = read_object(folder / "config_sentence_transformers.json")
        similarity = "cosine" if query.normalized else config.get("similarity_fn_name") or "cosine"
        if similarity not in SIMILARITIES:
            raise CheckpointError(f"{folder}: expected similarity cosine or dot, got {similarity!r}")
        prompts = config.get("prompts") or {}
        if not (query.pools_prompt and doc.pools_prompt) and any(prompts.values()):
            raise CheckpointError(
                f"{folder}: expected a Pooling that includes prompts, got include_prompt: false; models that leave prompts out of the mean "
                "are not supported"
            )
        own = read_object(folder / "scorer.json")
        learned = own.get("learned", False)
        scorer = cls(
            query.encoder, pooling=query.pooling, similarity=similarity, activation=query.activation,
            # `encode_document` reads no other key
            query_prompt=prompts.get("query") or "", doc_prompt=prompts.get("document") or "",
            temperature=1.0 if learned else own.get("temperature", 1.0), learn_temperature=learned,
        )  # fmt: skip
        scorer.projection = query.projection
        if not tied:
            scorer.doc_encoder, scorer.doc_projection = doc.encoder, doc.projection
        if scorer.log_temperature is not None:
            scorer.log_temperature.data.fill_(own["temperature"])
        scorer.text_limits = (
            layout.text_limit(query.encoder, query.config, "query_length", scorer.layouts()[0]),
            layout.text_limit(doc.encoder, doc.config, "document_length", scorer.layouts()[1]),
        )
        return scorer


class _Side:
    """The modules of queries or of docs."""

    def __init__(self, folder: Path, modules: list[layout.Module], execution: Execution) -> None:
        self.pooling, self.projection, self.activation, self.normalized = "", None, "identity", False
        self.pools_prompt = True
        if modules[0].kind != "Transformer":
            raise CheckpointError(f"{folder}: expected a Transformer first, got {modules[0].kind}")
        self.encoder, self.config = layout.read_encoder(modules[0].folder, execution)
        for module in modules[1:]:
            if module.kind == "Pooling":
                self.pooling, self.pools_prompt = _pooling_of(module), module.config.get("include_prompt", True)
            elif module.kind == "Dense" and self.projection is None:
                self.projection, self.activation = layout.read_dense(module)
            elif module.kind == "Normalize":
                self.normalized = True
            else:
                raise CheckpointError(
                    f"{folder}: expected Transformer, Pooling, at most one Dense, Normalize; got {module.kind}"
                )
        if not self.pooling:
            raise CheckpointError(
                f"{folder}: expected a Pooling module, got none; a model of token vectors loads as colbert"
            )


def _pooling_of(module: layout.Module) -> str:
    """The pooling that a configuration of either generation names."""
    modes = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}
    config = module.config
    chosen = [config["pooling_mode"]] if "pooling_mode" in config else [
        modes.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value
    ]  # fmt: skip
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise CheckpointError(f"{module.folder}: expected one of {', '.join(POOLINGS)} as pooling, got {chosen}")
    return chosen[0]


def _projection(encoder: Encoder, size: int) -> nn.Linear:
    linear = nn.Linear(encoder.dim, size)
    nn.init.orthogonal_(
        linear.weight
    )  # keeps angles where it can, so that training starts from the encoder's own similarities
    nn.init.zeros_(linear.bias)
    return linear
