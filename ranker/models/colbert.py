"""ColBERT: one vector per token of query and doc, compared by MaxSim (Khattab and Zaharia, 2020, arXiv:2004.12832)."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.errors import ConfigError
from ranker.export import multi_vector_encoder, stanford_colbert
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors, full_precision, maxsim_all, maxsim_pairs
from ranker.models._bi_encoder import SIMILARITIES, check_choice, new_projection, text_limit, vector_size
from ranker.models._markers import add_markers, expansion_token
from ranker.models._prompts import check_instruction, prefix_of, text_layouts
from ranker.types import RankBatch, TokenBatch


@dataclass(frozen=True)
class Expansion:
    """How queries are extended to a fixed length.

    Args:
        length: Number of tokens to which a shorter query is extended, special tokens included; 0: no expansion.
        token: Id of the token that extends queries.
        attended: Whether other tokens attend to the expansion.
        cuts: Whether longer queries are cut to `length`.
    """

    length: int
    token: int
    attended: bool
    cuts: bool


def token_layouts(
    tokenizer: Any, query_prompt: str, doc_prompt: str, expansion: Expansion
) -> tuple[Template, Template]:
    """Return the layouts of a query and of a doc: special tokens, marker, expansion."""
    query, doc = text_layouts(tokenizer, query_prompt, doc_prompt)
    if not expansion.length:
        return query, doc
    expanded = replace(
        query,
        fill_to=expansion.length,
        fill_token=expansion.token,
        attend_fill=expansion.attended,
        max_tokens=expansion.length if expansion.cuts else None,
    )
    return expanded, doc


class ColBERT(nn.Module):
    r"""Score a query and a doc by MaxSim: the sum over query tokens of the best similarity with a doc token.

    .. math:: s(q, d) = \sum_{i \in q} \max_{j \in d} \mathrm{sim}(E_i(q), E_j(d))

    A query is laid out as `[CLS] [Q] query [SEP] [MASK] ...`, a doc as `[CLS] [D] doc [SEP]`. The markers become
    special tokens of the tokenizer, so that no text can contain them (`add_markers`).

    Args:
        encoder: The encoder of queries and docs.
        projection: Size of a token vector; None: the encoder's hidden states are the vectors.
        similarity: Similarity of two token vectors: `cosine` or `dot`.
        query_prompt: Marker before each query, such as `[Q]`. A marker of the vocabulary is used as it is. A marker in
            brackets is added to the vocabulary if it is missing. Any other marker is tokenized as text.
        doc_prompt: Marker before each doc, `[D]`. Both markers may be templates that end with `{query}` or `{doc}`.
        instruction: Text for `{instruction}` in such templates.
        query_length: Number of tokens, special tokens included, to which shorter queries are extended with `[MASK]`, or
            with the eos token if the tokenizer has no mask token (`expansion_token`); 0: no expansion.
        attend_to_expansion: Whether other tokens attend to the expansion. If false, as in the paper, the expansion does
            not change the vectors of the query's own tokens.
        cut_queries: Whether longer queries are cut to `query_length`, as in the paper.
        mask_punctuation: Whether tokens of docs that are punctuation marks have no vector.
        in_batch_negatives: Whether, in training, the docs of a step's other queries are negatives. If true, memory must
            hold all token vectors of a step. None: true, except if labels are a teacher's scores.
        symmetric: Whether each positive doc is also contrasted with the step's other queries.

    Attributes:
        fill_token: Id of the token that extends queries.
        skiplist: Words of docs that get no vectors.
    """

    reads = "texts"
    training_keys = ("in_batch_negatives", "symmetric")
    vectors = "tokens"
    doc_encoder: Encoder | None = None  # docs and queries have one encoder

    def __init__(
        self,
        encoder: Encoder,
        projection: int | None = 128,
        similarity: str = "cosine",
        query_prompt: str = "[unused0]",
        doc_prompt: str = "[unused1]",
        instruction: str = "",
        query_length: int = 32,
        attend_to_expansion: bool = False,
        cut_queries: bool = False,
        mask_punctuation: bool = True,
        in_batch_negatives: bool | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__()
        check_choice("model.similarity", similarity, SIMILARITIES)
        if query_length < 0 or (cut_queries and not query_length):
            raise ConfigError(
                f"model.query_length: expected at least {int(cut_queries)} with cut_queries={cut_queries}, "
                f"got {query_length}"
            )
        check_layout(encoder, 1)
        self.encoder, self.similarity = encoder, similarity
        self.fill_token = expansion_token(encoder) if query_length else 0
        check_instruction(instruction, query_prompt, doc_prompt)
        prompts = {"query": query_prompt, "doc": doc_prompt}
        markers = [prefix_of(prompt, field, instruction).strip() for field, prompt in prompts.items()]
        # as in other programs, a blank is between marker and text
        self.query_prompt, self.doc_prompt = (f"{marker} " if marker else "" for marker in markers)
        self.query_length, self.attend_to_expansion, self.cut_queries = query_length, attend_to_expansion, cut_queries
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.projection = new_projection(encoder, projection, bias=False) if projection is not None else None
        add_markers(encoder, markers)
        vocabulary = encoder.tokenizer.get_vocab()
        self.skiplist = [mark for mark in string.punctuation if mark in vocabulary] if mask_punctuation else []
        self._skipped: Tensor
        self.register_buffer("_skipped", torch.zeros(1 + max(vocabulary.values()), dtype=torch.bool), persistent=False)
        self._mark_skipped()
        self.text_limits: tuple[int, int] | None = None  # set by `load`

    def _mark_skipped(self) -> None:
        """Mark the token ids of the skiplist."""
        vocabulary = self.encoder.tokenizer.get_vocab()
        self._skipped[[vocabulary[word] for word in self.skiplist]] = True

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return vector_size(self.encoder, self.projection)

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc: special tokens, marker, expansion."""
        return self._layouts(self.query_prompt, self.doc_prompt)

    def prompted_layouts(self, query_prompt: str, doc_prompt: str, instruction: str) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc with other prompts; for the arguments see the class."""
        check_instruction(instruction, query_prompt, doc_prompt)
        prompts = {"query": query_prompt, "doc": doc_prompt}
        markers = [prefix_of(prompt, field, instruction).strip() for field, prompt in prompts.items()]
        return self._layouts(*(f"{marker} " if marker else "" for marker in markers))

    def _layouts(self, query_prompt: str, doc_prompt: str) -> tuple[Template, Template]:
        expansion = Expansion(self.query_length, self.fill_token, self.attend_to_expansion, self.cut_queries)
        return token_layouts(self.encoder.tokenizer, query_prompt, doc_prompt, expansion)

    def settings(self) -> dict[str, Any]:
        """Return the options that change the vectors, besides weights and tokenizer.

        Stored vectors have a hash of these options, the weights and the tokenizer.
        """
        return {
            "scorer": "colbert",
            "similarity": self.similarity,
            "projection": repr(self.projection),
            "skiplist": self.skiplist,
            "layouts": repr(self.layouts()),
        }

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return one vector per token, expansion included, float32 [tokens, dim]."""
        return TextVectors(self._encode(batch), batch.cu_seqlens.diff().long(), batch.max_length)

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return one vector per token, float32; special tokens have vectors, words of the skiplist have none."""
        tokens = self._has_vector(batch).nonzero().squeeze(1)  # before the encoder, as the host waits for the device
        vectors = self._encode(batch).index_select(0, tokens)
        return TextVectors(vectors, self.doc_vector_counts(batch), batch.max_length)

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return the number of vectors of each doc, int64 [docs], without encoding the docs."""
        return functional.pad(self._has_vector(batch).long().cumsum(0), (1, 0))[batch.cu_seqlens.long()].diff()

    def _has_vector(self, batch: TokenBatch) -> Tensor:
        """Return which tokens of docs have a vector, bool [tokens]."""
        return ~self._skipped[batch.tokens]

    def _encode(self, batch: TokenBatch) -> Tensor:
        states = self.encoder(batch)
        vectors = full_precision(states if self.projection is None else self.projection(states))
        return functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs]."""
        return maxsim_all(queries, docs)

    def scoring_parameters(self) -> list[nn.Parameter]:
        """Return an empty list: `score_block` reads no trained parameters."""
        return []

    def divisor(self) -> float:
        """Return 1: similarities are not divided by a temperature."""
        return 1.0

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with the docs of its group; 0 in cells without a doc."""
        assert batch.queries is not None and batch.docs is not None
        owners = batch.doc_mask.nonzero_static(size=batch.docs.num_rows)[:, 0]
        docs = self.encode_docs(batch.docs)  # docs are encoded before queries, as in ContrastiveModule
        scores = maxsim_pairs(self.encode_queries(batch.queries), docs, owners)
        return to_grid(scores, batch.doc_mask)

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write a folder that sentence-transformers (6.0 on) loads as a MultiVectorEncoder.

        Args:
            folder: Where to write.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
        """
        model = multi_vector_encoder.MultiVectorModel(
            self.encoder,
            self.projection,
            self.similarity,
            self.query_prompt,
            self.doc_prompt,
            self.query_length,
            self.attend_to_expansion,
            self.cut_queries,
            self.skiplist,
        )
        multi_vector_encoder.write(folder, model, max_tokens, max_query_tokens)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> ColBERT:
        """Load a folder of sentence-transformers, or of Stanford ColBERT (`HF_ColBERT` with artifact.metadata).

        Raises:
            CheckpointError: The folder is of neither program, or has a setting that this model does not have.
        """
        known = multi_vector_encoder.has_modules(folder)
        model = (multi_vector_encoder if known else stanford_colbert).read(folder, execution)
        scorer = cls(
            model.encoder,
            projection=None,
            similarity=model.similarity,
            query_prompt=model.query_prompt if model.add_markers else "",
            doc_prompt=model.doc_prompt if model.add_markers else "",
            query_length=model.query_length,
            attend_to_expansion=model.attend_to_expansion,
            cut_queries=model.cut_queries,
            mask_punctuation=False,
        )
        if not model.add_markers:  # the folder's tokenizer already has its markers
            scorer.query_prompt, scorer.doc_prompt = model.query_prompt, model.doc_prompt
        vocabulary = model.encoder.tokenizer.get_vocab()
        scorer.projection = model.projection
        scorer.skiplist = [word for word in model.skiplist if word in vocabulary]
        scorer._mark_skipped()
        query, doc = scorer.layouts()
        scorer.text_limits = (
            text_limit(model.encoder, model.lengths, "query_length", query),
            text_limit(model.encoder, model.lengths, "document_length", doc),
        )
        return scorer
