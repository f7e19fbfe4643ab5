"""Masked words: predict masked tokens from the rest of the text (BERT, Devlin et al., 2019, arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ranker.encoders.encoder import Encoder
from ranker.pretraining.blocks import MaskedBlocks
from ranker.pretraining.masking import MaskedBatch, Masking, masked_loss
from ranker.pretraining.module import MaskedModel, PretrainModule
from ranker.pretraining.texts import Texts
from ranker.training.rerank_module import RerankModule


class MLM:
    r"""Cross-entropy of masked tokens: the mean of :math:`-\log p(w_i \mid \text{row})` over the step's masked tokens.

    A row is a block of a doc with some tokens masked. As in RoBERTa (Liu et al., 2019, arXiv:1907.11692), there is no
    next-sentence prediction, and different tokens are masked in each epoch.

    Args:
        share: See `Masking`.
        masked: See `Masking`.
        random: See `Masking`.
    """

    pairs = False

    def __init__(self, share: float = 0.15, masked: float = 0.8, random: float = 0.1) -> None:
        self.masking = Masking(share, masked, random)

    def model(self, encoder: Encoder) -> MLMModel:
        """Return the encoder with the head of its masked language model."""
        return MLMModel(encoder)

    def draws(self, texts: Texts) -> MaskedBlocks:
        """Return the object that draws blocks with masked tokens."""
        return MaskedBlocks(texts, self.masking)

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the module that trains the model."""
        return PretrainModule(model, [], **options)


class MLMModel(MaskedModel):
    """An encoder with the head of its family's masked language model."""

    def forward(self, batch: MaskedBatch) -> Tensor:
        """Return the micro-batch's part of the step's loss, a scalar."""
        assert batch.docs is not None and batch.hidden is not None
        return masked_loss(self.head, self.encoder(batch.docs), batch.hidden)
