"""Training for objectives whose loss is a sum over rows: `mlm`, `prop` and `electra`."""

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
    """Train a model whose forward pass returns the loss.

    The model returns a micro-batch's part of the step's loss, already divided by counts of the whole step. So the
    number of devices and the memory budget change the result only by rounding.
    """

    scorer: Any

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the micro-batch's part of the step's loss, a scalar."""
        loss: Tensor = self.scorer(batch)
        return loss


class Objective(Protocol):
    """A pretraining objective: a class of `ranker.pretraining.objectives`, built from a yaml file of conf/objective."""

    pairs: bool  # whether a row has a text in place of the query before the doc

    def model(self, encoder: Encoder) -> Any:
        """Return the model to train, a module with an attribute `encoder` and a method `save(folder, max_tokens)`."""
        ...

    def draws(self, texts: Texts) -> Draws:
        """Return the object that draws the rows of each step from the texts."""
        ...

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the Lightning module that trains the model; `options` are those of `RerankModule`."""
        ...


class MaskedModel(nn.Module):
    """An encoder with its head for masked language modelling; if the encoder has no such head, a random one is added.

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
        """Write the masked language model and its tokenizer; `encoder.name` and transformers can load the folder.

        Args:
            folder: The folder.
            max_tokens: Number of tokens of the longest row.
        """
        self.head.save(folder, self.encoder.model)
        save_tokenizer(folder, self.encoder, max_tokens)


def save_tokenizer(folder: Path, encoder: Encoder, max_tokens: int) -> None:
    """Write an encoder's tokenizer; the length of the longest row, `max_tokens`, becomes the tokenizer's limit."""
    tokenizer: Any = encoder.tokenizer
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(folder)


def linear_layer(encoder: Encoder, size: int) -> nn.Linear:
    """Return a new linear layer that reads states, initialized as in BERT.

    Args:
        encoder: The encoder.
        size: Number of outputs.
    """
    linear = nn.Linear(encoder.dim, size)
    nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
    nn.init.zeros_(linear.bias)
    return linear
