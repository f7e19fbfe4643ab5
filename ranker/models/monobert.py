"""monoBERT: a head scores query and doc in one sequence (Nogueira and Cho, 2019, arXiv:1901.04085)."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.errors import ConfigError
from ranker.export import huggingface
from ranker.interactions.grid import to_grid
from ranker.interactions.pooling import POOLINGS
from ranker.types import RankBatch


class MonoBERT(nn.Module):
    r"""Score `[CLS] query [SEP] doc [SEP]`, token types 0 and 1, by a linear head.

    .. math:: s(q, d) = w \cdot h_{[CLS]}(q, d) + b

    Args:
        encoder: The encoder.
        pooling: What the head reads: `cls`, `mean` or `max` over the last layer's tokens.
        pooler: Put BERT's dense layer and tanh (with random initial weights) between pooling and head.
        num_labels: 1 (the score is the logit) or 2 (as in the paper: the score is the log-odds, logit 1 - logit 0).
        dropout: Dropout rate before the head.
    """

    reads = "pairs"
    text_limits: tuple[int, int] | None = None

    def __init__(
        self, encoder: Encoder, pooling: str = "cls", pooler: bool = False, num_labels: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"model.pooling: expected one of {', '.join(POOLINGS)}; got {pooling!r}")
        if num_labels not in (1, 2):
            raise ConfigError(f"model.num_labels: expected 1 or 2, got {num_labels}")
        check_layout(encoder, 2, pooling)
        self.encoder, self.pooling = encoder, pooling
        self.pooler = nn.Sequential(nn.Linear(encoder.dim, encoder.dim), nn.Tanh()) if pooler else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_labels)
        for linear in (part for part in (*self.pooler.modules(), self.head) if isinstance(part, nn.Linear)):
            nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
            nn.init.zeros_(linear.bias)

    def logits(self, batch: RankBatch) -> Tensor:
        """Return the logits of each real doc, float32, [rows, num_labels]."""
        assert batch.pairs is not None
        return self.read(self.encoder.pooled(batch.pairs, self.pooling))

    def read(self, pooled: Tensor) -> Tensor:
        """Return the logits of rows from their pooled states [rows, dim], float32, [rows, num_labels]."""
        # without autocast: bf16 scores above 2 are 1/64 apart, so good candidates would tie
        with torch.autocast(pooled.device.type, enabled=False):
            logits = self.head(self.dropout(self.pooler(pooled)))
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        return self.scores(self.logits(batch), batch.doc_mask)

    def scores(self, logits: Tensor, doc_mask: Tensor) -> Tensor:
        """Return scores [batch, docs] from logits [rows, num_labels]; 0 in cells without a doc."""
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return to_grid(scores, doc_mask)

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write a Hugging Face folder, see `ranker.export.huggingface.write`.

        Args:
            folder: Where to write.
            max_tokens: Longest pair, special tokens included; stored with the tokenizer.
        """
        dense = self.pooler[0] if isinstance(self.pooler, nn.Sequential) else None
        assert dense is None or isinstance(dense, nn.Linear)
        model = huggingface.Classifier(self.encoder, self.pooling, dense, self.head, self.dropout.p)
        huggingface.write(folder, model, max_tokens)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a sequence classification folder: one written by `save`, or any of the same families with 1 or 2 labels.

        Raises:
            CheckpointError: The folder has no trained head, or one of another size; a weight is missing, or one is
                there that the model does not have.
        """
        model = huggingface.read(Path(folder), execution)
        num_labels, has_dense = model.head.out_features, model.dense is not None
        scorer = cls(model.encoder, model.pooling, pooler=has_dense, num_labels=num_labels, dropout=model.dropout)
        scorer.head.load_state_dict(model.head.state_dict())
        if isinstance(scorer.pooler, nn.Sequential) and model.dense is not None:
            scorer.pooler[0].load_state_dict(model.dense.state_dict())
        return scorer
