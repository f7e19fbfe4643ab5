"""ColBERT: a query and a doc are one vector per token, compared by MaxSim (Khattab and Zaharia, 2020, arXiv:2004.12832)."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn import functional

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError, ConfigError
from ranker.export import sentence_transformers as layout
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors, full_precision, maxsim_all, maxsim_pairs
from ranker.types import RankBatch, TokenBatch

SIMILARITIES = ("cosine", "dot")


class ColBERT(nn.Module):
    """Score a query and a doc by the sum, over the query's tokens, of the best similarity with a token of the doc.

    A query is laid out as `[CLS] [Q] query [SEP] [MASK] ...`, a doc as `[CLS] [D] doc [SEP]`. The tokenizer learns the
    markers as special tokens, so that no text can hold them.

    Args:
        encoder: The encoder of both.
        projection: Size of a token vector; None: the encoder's own states.
        similarity: Of two token vectors: `cosine` or `dot`.
        query_prompt: Marker before each query, `[Q]`: one token where the vocabulary has it, else its pieces.
        doc_prompt: Marker before each doc, `[D]`.
        query_length: Shorter queries are filled up with `[MASK]` to so many tokens, special ones included; 0: no
            expansion.
        attend_to_expansion: Whether other tokens attend to the filling; off, as in the paper, it leaves the query's own
            vectors as they are.
        cut_queries: Whether longer queries are cut to `query_length`, as in the paper.
        mask_punctuation: Whether a doc's punctuation has no vectors.
        in_batch_negatives: Whether, in training, the docs of a step's other queries are negatives (all token vectors of
            the step are held then); None: unless labels are a teacher's scores.
        symmetric: Whether each positive doc is also set against the step's other queries.
    """

    reads = "texts"

    def __init__(
        self,
        encoder: Encoder,
        projection: int | None = 128,
        similarity: str = "cosine",
        query_prompt: str = "[unused0]",
        doc_prompt: str = "[unused1]",
        query_length: int = 32,
        attend_to_expansion: bool = False,
        cut_queries: bool = False,
        mask_punctuation: bool = True,
        in_batch_negatives: bool | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__()
        if similarity not in SIMILARITIES:
            raise ConfigError(f"model.similarity: expected one of {', '.join(SIMILARITIES)}; got {similarity!r}")
        if query_length < 0 or (cut_queries and not query_length):
            raise ConfigError(
                f"model.query_length: expected at least {int(cut_queries)} with cut_queries={cut_queries}, got {query_length}"
            )
        if query_length and encoder.tokenizer.mask_token_id is None:
            raise ConfigError("model.query_length: expected 0, since the encoder's tokenizer has no mask token")
        mask, rows = encoder.tokenizer.mask_token_id, len(encoder.model.get_input_embeddings().weight)
        if query_length and mask >= rows:
            raise ConfigError(
                f"model.query_length: expected 0, since the mask token's id {mask} is outside the encoder's {rows} embeddings"
            )
        check_layout(encoder, 1)
        self.encoder, self.similarity = encoder, similarity
        # with the blank that other programs put between marker and text
        self.query_prompt, self.doc_prompt = (
            f"{prompt.strip()} " if prompt.strip() else "" for prompt in (query_prompt, doc_prompt)
        )
        self.query_length, self.attend_to_expansion, self.cut_queries = query_length, attend_to_expansion, cut_queries
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.projection = _projection(encoder, projection) if projection is not None else None
        vocabulary = encoder.tokenizer.get_vocab()
        markers = [prompt.strip() for prompt in (query_prompt, doc_prompt) if prompt.strip() in vocabulary]
        encoder.tokenizer.add_tokens(
            [AddedToken(marker, normalized=False, special=True) for marker in markers], special_tokens=True
        )
        self.skiplist = [mark for mark in string.punctuation if mark in vocabulary] if mask_punctuation else []
        self._skipped: Tensor
        self.register_buffer("_skipped", torch.zeros(1 + max(vocabulary.values()), dtype=torch.bool), persistent=False)
        self._skip()
        self.text_limits: tuple[int, int] | None = (
            None  # longest query and doc without special tokens, where the loaded folder says so
        )

    def _skip(self) -> None:
        vocabulary = self.encoder.tokenizer.get_vocab()
        self._skipped[[vocabulary[word] for word in self.skiplist]] = True

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.projection.out_features if self.projection is not None else self.encoder.dim

    def layouts(self) -> tuple[Template, Template]:
        """How a query and a doc are laid out."""
        tokenizer = self.encoder.tokenizer
        single = Template.of(tokenizer, 1)
        query, doc = (layout.with_prompt(tokenizer, single, prompt) for prompt in (self.query_prompt, self.doc_prompt))
        expanded = replace(
            query,
            fill_to=self.query_length,
            fill_token=tokenizer.mask_token_id or 0,
            attend_fill=self.attend_to_expansion,
            max_tokens=self.query_length if self.cut_queries else None,
        )
        return expanded, doc

    def settings(self) -> dict[str, Any]:
        """What decides the vectors beside weights and tokenizer; an index remembers its hash."""
        return {
            "scorer": "colbert",
            "similarity": self.similarity,
            "skiplist": self.skiplist,
            "layouts": repr(self.layouts()),
        }

    # vectors and scores
    # ---------------------------------------------------------------------------------------------------------------

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """One vector per token, expansion included."""
        return TextVectors(self._encode(batch), batch.cu_seqlens.diff().long())

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """One vector per token, special ones included, punctuation left out if `mask_punctuation`."""
        vectors = self._encode(batch)
        kept = self.kept(batch)
        return TextVectors(vectors[kept], self.doc_vectors(batch))

    def kept(self, batch: TokenBatch) -> Tensor:
        """Which tokens of docs have a vector, bool [tokens]."""
        return ~self._skipped[batch.tokens]

    def doc_vectors(self, batch: TokenBatch) -> Tensor:
        """How many vectors each doc has, int64 [docs]; known without encoding."""
        return functional.pad(self.kept(batch).long().cumsum(0), (1, 0))[batch.cu_seqlens.long()].diff()

    def _encode(self, batch: TokenBatch) -> Tensor:
        states = self.encoder(batch)
        vectors = full_precision(states if self.projection is None else self.projection(states))
        return functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs]."""
        return maxsim_all(queries, docs)

    def scoring_parameters(self) -> list[nn.Parameter]:
        """Parameters that `score_block` reads beside the vectors: none."""
        return []

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with its own docs; 0 where no doc is."""
        assert batch.queries is not None and batch.docs is not None
        owners = batch.doc_mask.nonzero_static(size=batch.docs.num_rows)[:, 0]
        scores = maxsim_pairs(self.encode_queries(batch.queries), self.encode_docs(batch.docs), owners)
        return to_grid(scores, batch.doc_mask)

    # folders
    # ------------------------------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write the layout of sentence-transformers' MultiVectorEncoder (6.0 on).

        Args:
            folder: Where to.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
        """
        expansion = {
            "strategy": "fixed" if self.cut_queries else "min",
            "attend": self.attend_to_expansion,
            "token": None,
            "length": self.query_length,
        }
        queries = {} if self.cut_queries else {"query_length": max(max_query_tokens or max_tokens, self.query_length)}
        layout.write_encoder(
            folder, self.encoder, max_tokens,
            {**queries, "document_length": max_tokens, "query_expansion": expansion if self.query_length else None},
        )  # fmt: skip
        modules = [("", "sentence_transformers.base.modules.transformer.Transformer")]
        if self.projection is not None:
            layout.write_dense(
                folder / "1_Dense", self.projection, "identity", {"module_input_name": "token_embeddings"}
            )
            modules.append(("1_Dense", "sentence_transformers.base.modules.dense.Dense"))
        mask = f"{len(modules)}_MultiVectorMask"
        layout.write_json(
            folder / mask / "config.json", {"skiplist_words": self.skiplist, "skiplist_tasks": ["document"]}
        )
        modules.append((mask, "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"))
        if self.similarity == "cosine":
            path = f"{len(modules)}_Normalize"
            layout.write_json(folder / path / "config.json", {"module_input_name": "token_embeddings"})
            modules.append((path, "sentence_transformers.base.modules.normalize.Normalize"))
        layout.write_modules(
            folder, modules, {"query": self.query_prompt, "document": self.doc_prompt}, "MultiVectorEncoder", "maxsim"
        )

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> ColBERT:
        """Load sentence-transformers' layout, or Stanford ColBERT's (`HF_ColBERT` with artifact.metadata).

        Raises:
            CheckpointError: Neither, or settings that this model has not.
        """
        return (
            cls._load_modules(folder, execution) if layout.is_layout(folder) else cls._load_stanford(folder, execution)
        )

    @classmethod
    def _load_modules(cls, folder: Path, execution: Execution) -> ColBERT:
        modules = layout.read_modules(folder)["query"]
        kinds = [module.kind for module in modules]
        if kinds[0] != "Transformer" or "MultiVectorMask" not in kinds or kinds.count("Dense") > 1:
            raise CheckpointError(
                f"{folder}: expected Transformer, at most one Dense, MultiVectorMask, Normalize; got {', '.join(kinds)}"
            )
        encoder, config = layout.read_encoder(modules[0].folder, execution)
        by_kind = {module.kind: module for module in modules}
        projection, activation = layout.read_dense(by_kind["Dense"]) if "Dense" in by_kind else (None, "identity")
        mask = by_kind["MultiVectorMask"].config
        expansion = config.get("query_expansion")
        settings = read_object(folder / "config_sentence_transformers.json")
        refused = {
            "an activation after the projection": activation != "identity",
            "skiplist_tasks": mask.get("skiplist_tasks", ["document"]) != ["document"]
            and bool(mask.get("skiplist_words")),
            "keep_only_token_ids": bool(mask.get("keep_only_token_ids")),
            "an expansion token other than the mask token": bool((expansion or {}).get("token")),
            "similarity_fn_name": settings.get("similarity_fn_name") not in (None, "maxsim"),
        }
        if any(refused.values()):
            raise CheckpointError(
                f"{folder}: {', '.join(name for name, found in refused.items() if found)}: not supported by model=colbert"
            )
        prompts = settings.get("prompts") or {}
        scorer = cls(
            encoder,
            projection=None,
            similarity="cosine" if "Normalize" in by_kind else "dot",
            query_prompt="",
            doc_prompt="",
            query_length=expansion["length"] if expansion else 0,
            attend_to_expansion=bool(expansion and expansion.get("attend")),
            cut_queries=bool(expansion and expansion["strategy"] == "fixed"),
            mask_punctuation=False,
        )
        # as they are: a marker that the folder's tokenizer cuts is cut by that program, too
        scorer.query_prompt, scorer.doc_prompt = prompts.get("query") or "", prompts.get("document") or ""
        return scorer._complete(projection, mask.get("skiplist_words") or [], config)

    @classmethod
    def _load_stanford(cls, folder: Path, execution: Execution) -> ColBERT:
        if "HF_ColBERT" not in (read_object(folder / "config.json").get("architectures") or []):
            raise CheckpointError(
                f"{folder}: expected modules.json, or config.json with the architecture HF_ColBERT; got neither"
            )
        metadata: dict[str, Any] = read_object(folder / "artifact.metadata")
        if metadata.get("similarity", "cosine") != "cosine":
            raise CheckpointError(f"{folder}: similarity: expected cosine, got {metadata['similarity']!r}")
        encoder, _ = layout.read_encoder(folder, execution)
        weight = _stanford_projection(folder)
        scorer = cls(
            encoder, projection=None, query_prompt=metadata.get("query_token_id") or "[unused0]",
            doc_prompt=metadata.get("doc_token_id") or "[unused1]", query_length=metadata.get("query_maxlen") or 32,
            attend_to_expansion=bool(metadata.get("attend_to_mask_tokens")), cut_queries=True, mask_punctuation=False,
        )  # fmt: skip
        skiplist = list(string.punctuation) if metadata.get("mask_punctuation", True) else []
        return scorer._complete(
            layout.linear_of(weight, None), skiplist, {"document_length": metadata.get("doc_maxlen")}
        )

    def _complete(self, projection: nn.Linear | None, skiplist: list[str], config: dict[str, Any]) -> ColBERT:
        """Put in what a folder holds beside the encoder."""
        vocabulary = self.encoder.tokenizer.get_vocab()
        self.projection, self.skiplist = projection, [word for word in skiplist if word in vocabulary]
        self._skip()
        query, doc = self.layouts()
        self.text_limits = (
            layout.text_limit(self.encoder, config, "query_length", query),
            layout.text_limit(self.encoder, config, "document_length", doc),
        )
        return self


def _projection(encoder: Encoder, size: int) -> nn.Linear:
    linear = nn.Linear(encoder.dim, size, bias=False)
    nn.init.orthogonal_(
        linear.weight
    )  # keeps angles where it can, so that training starts from the encoder's own similarities
    return linear


def _stanford_projection(folder: Path) -> Tensor:
    """`linear.weight`, which lies among the encoder's weights."""
    if (folder / "model.safetensors").is_file():
        state = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").is_file():
        state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(f"{folder}: expected model.safetensors or pytorch_model.bin, got neither")
    if "linear.weight" not in state:
        raise CheckpointError(
            f"{folder}: expected the projection linear.weight among the weights, got {json.dumps(sorted(state)[:3])} ..."
        )
    return state["linear.weight"]
