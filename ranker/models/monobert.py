"""monoBERT: query and document in one sequence, scored by a head on its first token (Nogueira and Cho, 2019, arXiv:1901.04085)."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ranker.errors import CheckpointError, ConfigError
from ranker.layers.encoder import Encoder
from ranker.layers.pooling import POOLINGS, pool
from ranker.types import RankBatch

SMALL = 2.0**-12  # see MonoBERT.save


class MonoBERT(nn.Module):
    """Score `[CLS] query [SEP] doc [SEP]`, segments 0 and 1, by a linear head.

    Args:
        encoder: The encoder.
        pooling: What the head reads: `cls`, `mean` or `max` over the last layer's tokens.
        pooler: Put BERT's dense + tanh (random at the start) between pooling and head.
        num_labels: 1 (one logit is the score) or 2 (the original: the score is the log-odds, logit 1 - logit 0).
        dropout: Dropout before the head.
    """

    reads = "pairs"

    def __init__(self, encoder: Encoder, pooling: str = "cls", pooler: bool = False, num_labels: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"model.pooling: expected one of {', '.join(POOLINGS)}; got {pooling!r}")
        if num_labels not in (1, 2):
            raise ConfigError(f"model.num_labels: expected 1 or 2, got {num_labels}")
        self.encoder, self.pooling = encoder, pooling
        self.pooler = nn.Sequential(nn.Linear(encoder.dim, encoder.dim), nn.Tanh()) if pooler else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_labels)
        for linear in (part for part in (*self.pooler.modules(), self.head) if isinstance(part, nn.Linear)):
            nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
            nn.init.zeros_(linear.bias)

    def logits(self, batch: RankBatch) -> Tensor:
        """Return one row of logits per real doc, float32, [rows, num_labels]."""
        assert batch.pairs is not None
        pooled = pool(self.encoder(batch.pairs), batch.pairs, self.pooling)
        logits = self.head(self.dropout(self.pooler(pooled)))
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 where no doc is."""
        logits = self.logits(batch)
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return scores.new_zeros(batch.doc_mask.shape).masked_scatter(batch.doc_mask, scores)

    # the Hugging Face folder -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write config.json, model.safetensors and the tokenizer as a sequence classification model of the encoder's family.

        transformers' BERT and RoBERTa classifiers put a dense layer and tanh between the first token and the logits. A scorer without
        a pooler is written with the dense layer `2^-12 I` and the head times `2^12`: tanh is the identity there up to 1e-7, and powers
        of two scale without rounding, so other programs give the same scores and `load` gives the same weights back.

        Args:
            folder: Where to.
            max_tokens: Longest pair, recorded with the tokenizer.

        Raises:
            CheckpointError: transformers has no classifier of this family with such a head.
        """
        config = copy.deepcopy(self.encoder.config)
        config.num_labels = self.head.out_features
        config.architectures = None
        if self.head.out_features == 1:
            # sentence-transformers would otherwise put a sigmoid on the logit
            config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
        model = AutoModelForSequenceClassification.from_config(config)
        dense, out = _classifier_of(model)
        if self.pooling != "cls":
            raise CheckpointError(f"model.pooling: expected cls for export to a sequence classification model, got {self.pooling!r}")
        model.base_model.load_state_dict(self.encoder.model.state_dict(), strict=False)
        with torch.no_grad():
            if isinstance(self.pooler, nn.Sequential):
                dense.weight.copy_(self.pooler[0].weight)
                dense.bias.copy_(self.pooler[0].bias)
                out.weight.copy_(self.head.weight)
            else:
                dense.weight.copy_(torch.eye(self.encoder.dim) * SMALL)
                dense.bias.zero_()
                out.weight.copy_(self.head.weight / SMALL)
            out.bias.copy_(self.head.bias)
        model.save_pretrained(folder)
        tokenizer = copy.deepcopy(self.encoder.tokenizer)
        tokenizer.model_max_length = max_tokens
        tokenizer.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, ragged: bool = True) -> MonoBERT:
        """Load a sequence classification folder: one written by `save`, or any of the same families with 1 or 2 labels.

        Raises:
            CheckpointError: The folder has no trained head, or one of another size.
        """
        config = AutoConfig.from_pretrained(folder)
        if not any("ForSequenceClassification" in name for name in config.architectures or []):
            raise CheckpointError(
                f"{folder}: expected a trained reranker (a sequence classification model), got {config.architectures}; "
                "its head would be random: train it first with encoder.name=..."
            )
        if config.num_labels not in (1, 2):
            raise CheckpointError(
                f"{folder}: expected a head of 1 or 2 labels, got {config.num_labels}; train a new one with encoder.name=..."
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        if info["missing_keys"]:
            raise CheckpointError(f"{folder}: expected all weights, {', '.join(sorted(info['missing_keys']))} are missing")
        dense, out = _classifier_of(model)
        plain = torch.equal(dense.weight, torch.eye(config.hidden_size) * SMALL)
        base = model.base_model
        if getattr(base, "pooler", None) is not None:
            base.pooler = None
        scorer = cls(Encoder(base, AutoTokenizer.from_pretrained(folder), ragged=ragged), pooler=not plain, num_labels=config.num_labels)
        with torch.no_grad():
            if isinstance(scorer.pooler, nn.Sequential):
                scorer.pooler[0].weight.copy_(dense.weight)
                scorer.pooler[0].bias.copy_(dense.bias)
            scorer.head.weight.copy_(out.weight * SMALL if plain else out.weight)
            scorer.head.bias.copy_(out.bias)
        return scorer


def _classifier_of(model: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """The dense layer before tanh and the output layer of a sequence classification model."""
    pooler = getattr(model.base_model, "pooler", None)
    head = getattr(model, "classifier", None)
    if pooler is not None and hasattr(pooler, "dense") and isinstance(head, nn.Linear):  # BERT
        return pooler.dense, head
    if head is not None and hasattr(head, "dense") and hasattr(head, "out_proj") and model.config.model_type != "electra":  # RoBERTa
        return head.dense, head.out_proj
    raise CheckpointError(
        f"model/: expected a family whose classifier is dense, tanh, linear (bert, roberta, xlm-roberta, camembert), got {model.config.model_type!r}"
    )
