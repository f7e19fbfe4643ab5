"""monoBERT: an encoder reads query and doc in one sequence (Nogueira and Cho, 2019, arXiv:1901.04085)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.causality import auto_pooling
from ranker.encoders.classifier import Classifier
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.family import family_of
from ranker.encoders.fit import check_layout
from ranker.encoders.native_head import READS, NativeHead, has_native_head
from ranker.errors import ConfigError
from ranker.export import cross_encoder, huggingface
from ranker.export._prompt import folder_prompt, trained_prompt, write_prompt
from ranker.interactions.grid import to_grid
from ranker.interactions.pooling import POOLINGS, pool
from ranker.models._pair_prompt import filled, pair_layout
from ranker.types import RankBatch, TokenBatch


class MonoBERT(nn.Module):
    r"""Score a query and a doc in one sequence, such as `[CLS] query [SEP] doc [SEP]`, with a head on the encoder.

    .. math:: s(q, d) = w \cdot h_{[CLS]}(q, d) + b

    Args:
        encoder: The encoder.
        head: `own`: a linear layer on pooled states. `native`: the head of the family's sequence classification model
            in transformers, for example dense layer, GELU, norm and classifier for ModernBERT, or a linear layer on
            the last token for a language model.
            `auto`: the trained head of `encoder.name` if this is a cross-encoder. Otherwise `own` in three cases: for
            BERT, RoBERTa, XLM-RoBERTa and CamemBERT, if `pooling` or `pooler` is given, and if transformers has no
            classification model of the family. In all other cases `native`.
        pooling: What the head `own` reads: `cls`, `mean`, `max`, `last` or `weightedmean` over the last layer's tokens,
            or `auto` (see `auto_pooling`).
        pooler: Whether BERT's dense layer (with random initial weights) and tanh are between pooling and the head
            `own`.
        num_labels: 1: the score is the logit. 2, as in the paper: the score is the log-odds, logit 1 - logit 0. A
            trained head keeps its number.
        dropout: Dropout rate before the head.
        prompt: Template with `{query}`, `{doc}` and optionally `{instruction}`; the filled template is one text. None:
            the prompt stored in the folder `encoder.name`; if there is none, query and doc are two texts.
        instruction: Text for `{instruction}`.

    Raises:
        ConfigError: An option has an unknown value, or two options do not fit together.
        CheckpointError: The family has no native head, or the tokenizer has no separator between query and doc.
    """

    reads = "pairs"
    takes_prompt = True
    default_prompt: str | None = None  # the prompt if the configuration has none
    takes_windows = True
    text_limits: tuple[int, int] | None = None

    def __init__(
        self,
        encoder: Encoder,
        head: str = "auto",
        pooling: str = "auto",
        pooler: bool = False,
        num_labels: int = 1,
        dropout: float = 0.0,
        prompt: str | None = None,
        instruction: str = "",
    ) -> None:
        super().__init__()
        if head not in ("auto", "own", "native"):
            raise ConfigError(f"model.head: expected auto, own or native; got {head!r}")
        if pooling not in (*POOLINGS, "auto"):
            raise ConfigError(f"model.pooling: expected one of {', '.join((*POOLINGS, 'auto'))}; got {pooling!r}")
        if num_labels not in (1, 2):
            raise ConfigError(f"model.num_labels: expected 1 or 2, got {num_labels}")
        if head == "native" and (pooler or pooling != "auto"):
            raise ConfigError("model.head: expected own with model.pooler or model.pooling, got native")
        self.encoder = encoder
        wanted = None if prompt is None else filled(prompt, instruction)
        self.prompt = trained_prompt(encoder, wanted) if self.takes_prompt else None
        stored = cross_encoder.initial_head(encoder, dropout) if head == "auto" and not pooler else None
        if stored is not None and pooling not in ("auto", stored.pooling):
            stored = None
        if self.prompt is None:
            check_layout(encoder, 2, trained=stored is not None)
        self.dropout = nn.Dropout(dropout)
        self.pooler: nn.Module = nn.Identity()
        self.head: nn.Linear | NativeHead
        if stored is not None:
            self._take(stored)
        elif head == "native" or (head == "auto" and not pooler and pooling == "auto" and prefers_native(encoder)):
            self._take(Classifier(encoder, NativeHead.of(encoder, num_labels, dropout), dropout=dropout))
        else:
            self.pooling = auto_pooling(encoder) if pooling == "auto" else pooling
            if pooler:
                self.pooler = nn.Sequential(nn.Linear(encoder.dim, encoder.dim), nn.Tanh())
            self.head = nn.Linear(encoder.dim, num_labels)
            for linear in (part for part in (*self.pooler.modules(), self.head) if isinstance(part, nn.Linear)):
                nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
                nn.init.zeros_(linear.bias)
        check_layout(encoder, 2 if self.prompt is None else 1, self.pooling, trained=stored is not None)

    def pair_layout(self) -> Template:
        """Return the layout of a query and a doc in one row."""
        tokenizer = self.encoder.tokenizer
        return Template.of(tokenizer, 2) if self.prompt is None else pair_layout(tokenizer, self.prompt, ends=True)

    def prompted_layout(self, prompt: str | None, instruction: str | None, _chat: bool | str = "auto") -> Template:
        """Return the layout of a pair in another prompt.

        Args:
            prompt: Template; None: the model's own prompt, in which the instruction is already filled in.
            instruction: Text for `{instruction}`.

        Raises:
            ConfigError: The model has no prompt, or the template lacks a field.
        """
        if self.prompt is None and prompt is None:
            raise ConfigError("model.prompt: expected a template with {instruction}, {query} and {doc}, got null")
        return pair_layout(self.encoder.tokenizer, filled(prompt or self.prompt or "", instruction or ""), ends=True)

    def _take(self, model: Classifier) -> None:
        """Replace the scoring head by the trained head of a loaded folder."""
        self.head, self.pooling = model.head, model.pooling
        if model.dense is not None:
            self.pooler = nn.Sequential(model.dense, nn.Tanh())

    def logits(self, batch: RankBatch) -> Tensor:
        """Return the logits of each real doc, float32, [rows, num_labels]."""
        assert batch.pairs is not None
        if isinstance(self.head, NativeHead) and self.head.reads == "all":
            return self.read(self.encoder(batch.pairs), batch.pairs)
        return self._vector_logits(self.row_vectors(batch.pairs), batch.pairs)

    def read(self, states: Tensor, batch: TokenBatch) -> Tensor:
        """Return the logits [rows, num_labels], float32, of rows from the states [tokens, dim] of all their tokens."""
        if not isinstance(self.head, NativeHead):
            return self._vector_logits(self._pooled(pool(states, batch, self.pooling)), batch)
        with torch.autocast(states.device.type, enabled=False):
            return _full(self.head(_full(states), batch))

    @property
    def vector_dim(self) -> int:
        """Size of the vector that the head reads from a row.

        Raises:
            ConfigError: The head reads the states of all tokens.
        """
        if isinstance(self.head, NativeHead) and self.head.reads == "all":
            raise ConfigError(
                "passages: expected a head that reads one vector of a row, got one that reads all its states; set "
                "model.head=own, or passages=maxp"
            )
        return self.encoder.dim

    def row_vectors(self, rows: TokenBatch) -> Tensor:
        """Return the vectors that the head reads, [rows, dim]."""
        pooling = READS[self.head.reads] if isinstance(self.head, NativeHead) else self.pooling
        return self._pooled(self.encoder.pooled(rows, pooling))

    def vector_scores(self, vectors: Tensor, rows: TokenBatch, chosen: Tensor) -> Tensor:
        """Apply the head to given vectors instead of the rows' own vectors; return their scores [vectors].

        PARADE calls this with its vectors of docs.

        Args:
            vectors: Vectors [vectors, dim] in the form of `row_vectors`.
            rows: The rows; a native head reads the first or the last token of a row.
            chosen: The row of each vector, int64 [vectors].
        """
        logits = self._vector_logits(vectors, rows, chosen)
        return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]

    def _pooled(self, pooled: Tensor) -> Tensor:
        """Return the vectors that the head reads from pooled states [rows, dim]."""
        # no autocast, because bf16 scores above 2 are 1/64 apart, so that good candidates would tie
        with torch.autocast(pooled.device.type, enabled=False):
            vectors: Tensor = _full(pooled) if isinstance(self.head, NativeHead) else self.pooler(pooled)
            return vectors

    def _vector_logits(self, vectors: Tensor, batch: TokenBatch, chosen: Tensor | None = None) -> Tensor:
        with torch.autocast(vectors.device.type, enabled=False):
            if isinstance(self.head, NativeHead):
                return _full(self.head.of_pooled(vectors, batch, chosen))
            return _full(self.head(self.dropout(vectors)))

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        return self.scores(self.logits(batch), batch.doc_mask)

    def scores(self, logits: Tensor, doc_mask: Tensor) -> Tensor:
        """Return scores [batch, docs] from logits [rows, num_labels]; 0 in cells without a doc."""
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return to_grid(scores, doc_mask)

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write a folder that other programs load as a cross-encoder with the same scores.

        The folder has a sequence classification model of transformers if such a model computes the same scores
        (`export.huggingface`), else the modules Transformer, Pooling and Dense of sentence-transformers
        (`export.cross_encoder`).

        Args:
            folder: Where to write.
            max_tokens: Longest pair, special tokens included; stored with the tokenizer.
        """
        model = self.classifier()
        if not huggingface.write(folder, model, max_tokens):
            cross_encoder.write(folder, model, max_tokens)
        write_prompt(folder, self.prompt)

    def classifier(self) -> Classifier:
        """Return encoder and head in the format of model folders."""
        dense = self.pooler[0] if isinstance(self.pooler, nn.Sequential) else None
        assert dense is None or isinstance(dense, nn.Linear)
        return Classifier(self.encoder, self.head, self.pooling, dense, self.dropout.p)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a cross-encoder's folder, written by `save`, transformers or sentence-transformers.

        Raises:
            CheckpointError: The folder has no trained head, or a head of another size; a weight is missing, or the
                folder has a weight that the model does not have.
        """
        model = (cross_encoder if cross_encoder.recognises(Path(folder)) else huggingface).read(Path(folder), execution)
        prompt = folder_prompt(Path(folder), model.encoder) if cls.takes_prompt else None
        options: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        scorer = cls(model.encoder, head="own", pooling="mean", **options)
        scorer.dropout.p = model.dropout
        scorer._take(model)
        check_layout(model.encoder, 2 if scorer.prompt is None else 1, scorer.pooling)
        return scorer


def prefers_native(encoder: Encoder) -> bool:
    """Return whether `head=auto` takes the native head; false if the family's classifier is a linear head (BERT)."""
    return family_of(encoder.config).classifier is None and has_native_head(encoder.config)


def _full(values: Tensor) -> Tensor:
    """Return values in float32; float64 values do not change."""
    return values if values.dtype == torch.float64 else values.float()
