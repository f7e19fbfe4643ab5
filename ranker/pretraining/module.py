"""The training of objectives whose loss is a sum over rows: masked words, representative words, replaced tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ranker.encoders.encoder import Encoder
from ranker.encoders.masked_lm import MaskedLMHead
from ranker.pretraining.steps import Draws
from ranker.pretraining.texts import Texts
from ranker.training.rerank_module import RerankModule
from ranker.types import RankBatch


class PretrainModule(RerankModule):
    """Train a model by the loss that it computes itself.

    The model returns each micro-batch's part of the step's loss, already divided by the counts of the whole step, so
    the number of devices and the memory budget change rounding only.
    """

    scorer: Any

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the micro-batch's part of the step's loss; its share is 1."""
        loss: Tensor = self.scorer(batch)
        return loss


class Objective(Protocol):
    """What a pretraining learns: a class of `ranker.pretraining.objectives`, built from a yaml of conf/objective."""

    pairs: bool  # whether its rows have a query before the doc

    def model(self, encoder: Encoder) -> Any:
        """Return what is trained: a module with `encoder` and `save(folder, max_tokens)`."""
        ...

    def draws(self, texts: Texts) -> Draws:
        """Return what is drawn from the texts."""
        ...

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the Lightning module that trains the model; `options` are those of `RerankModule`."""
        ...


class MaskedModel(nn.Module):
    """An encoder with the head of its family's masked language model, which begins at random where it has none.

    Args:
        encoder: The encoder.

    Raises:
        CheckpointError: The family has no masked language model.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = MaskedLMHead(encoder, new=True)

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write the masked language model and its tokenizer, which `encoder.name` and transformers load.

        Args:
            folder: Where to write.
            max_tokens: Longest row.
        """
        self.head.save(folder, self.encoder.model)
        save_tokenizer(folder, self.encoder, max_tokens)


def save_tokenizer(folder: Path, encoder: Encoder, max_tokens: int) -> None:
    """Write an encoder's tokenizer; `max_tokens` is the longest row."""
    tokenizer: Any = encoder.tokenizer
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(folder)


def linear_layer(encoder: Encoder, size: int) -> nn.Linear:
    """Return a new linear layer on states, with the weights of BERT's start.

    Args:
        encoder: The encoder.
        size: Number of outputs.
    """
    linear = nn.Linear(encoder.dim, size)
    nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
    nn.init.zeros_(linear.bias)
    return linear
