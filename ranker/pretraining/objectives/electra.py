"""Replaced tokens: predict which tokens a small generator replaced (ELECTRA, Clark et al., 2020, arXiv:2003.10555)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.encoders.encoder import Encoder
from ranker.encoders.masked_lm import MaskedLMHead
from ranker.encoders.model_runner import TokenCounts
from ranker.encoders.text_model import build, keep_layers
from ranker.errors import ConfigError
from ranker.pretraining.blocks import MaskedBlocks
from ranker.pretraining.masking import BLOCK, Hidden, MaskedBatch, Masking, masked_logits
from ranker.pretraining.module import PretrainModule, linear_layer, save_tokenizer
from ranker.pretraining.texts import Texts
from ranker.training.rerank_module import RerankModule


class ELECTRA:
    r"""The generator's loss on masked tokens, plus a weight times the encoder's loss on all tokens.

    .. math:: L = \mathrm{mean}_{masked} -\log p_G(w_i) + \lambda\, \mathrm{mean}_{tokens}\, \mathrm{BCE}(D(x)_t,\; x_t
        \ne w_t)

    The generator :math:`p_G` is a copy of the encoder's lowest layers that shares the encoder's word embeddings. It
    predicts masked tokens, as in `MLM`. For each masked token, a token is sampled from the predicted distribution and
    put into the text x. The encoder with a head, D, predicts for every token t whether it was replaced. A sampled
    token that equals the original :math:`w_t` counts as not replaced. The encoder's loss sends no gradient to the
    generator. Only the encoder is saved.

    Args:
        share: Share of each row's tokens to mask. The mask token replaces all masked tokens.
        generator_layers: Layers of the generator; None: a third of the encoder's layers, at least one.
        weight: Weight of the encoder's loss.

    Raises:
        ConfigError: A value is out of range.
    """

    pairs = False

    def __init__(self, share: float = 0.15, generator_layers: int | None = None, weight: float = 50.0) -> None:
        self.masking = Masking(share, masked=1.0, random=0.0)
        if weight <= 0:
            raise ConfigError(f"objective.weight: expected a number above 0, got {weight!r}")
        self.generator_layers, self.weight = generator_layers, weight

    def model(self, encoder: Encoder) -> ELECTRAModel:
        """Return the encoder with its head, and the generator."""
        return ELECTRAModel(encoder, self.generator_layers or max(1, encoder.num_layers // 3), self.weight)

    def draws(self, texts: Texts) -> MaskedBlocks:
        """Return the object that draws blocks with masked tokens."""
        return MaskedBlocks(texts, self.masking)

    def module(self, model: Any, **options: Any) -> RerankModule:
        """Return the module that trains the model."""
        return PretrainModule(model, [], **options)


class ELECTRAModel(nn.Module):
    """The encoder with a head that predicts replaced tokens, and the generator that replaces them.

    Args:
        encoder: The encoder.
        layers: Layers of the generator.
        weight: Weight of the encoder's loss.

    Raises:
        CheckpointError: The encoder's family has no masked language model.
    """

    def __init__(self, encoder: Encoder, layers: int, weight: float) -> None:
        super().__init__()
        self.encoder, self.weight = encoder, weight
        self.generator = lower_layers(encoder, layers)
        self.head = MaskedLMHead(self.generator, new=True)
        # the same layers as ElectraDiscriminatorPredictions of transformers
        self.found = nn.Sequential(linear_layer(encoder, encoder.dim), nn.GELU(), linear_layer(encoder, 1))

    def forward(self, batch: MaskedBatch) -> Tensor:
        """Return the micro-batch's part of the step's loss, a scalar."""
        rows, hidden = batch.docs, batch.hidden
        assert rows is not None and hidden is not None
        states = self.generator(rows)
        self.generator.token_counts = TokenCounts()  # its own counts: throughput counts only the encoder's tokens
        generator_loss, words = self.generate(states, hidden)
        originals = rows.tokens.index_copy(0, hidden.positions, hidden.words)
        seen = copy.copy(rows)
        seen.tokens = rows.tokens.index_copy(0, hidden.positions, words)
        logits = self.found(self.encoder(seen)).squeeze(1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        replaced = (seen.tokens != originals).to(logits.dtype)
        found = functional.binary_cross_entropy_with_logits(logits, replaced, reduction="sum") / batch.of_step
        return generator_loss + self.weight * found

    def generate(self, states: Tensor, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Return the generator's part of the loss, a scalar, and a word drawn for each masked token, int64 [masked].

        The draw uses the masked token's own random number (see `drawn`), so it does not depend on how the step is
        split.
        """
        total, words = states.new_zeros(()), []
        parts = zip(*(part.split(BLOCK) for part in (hidden.positions, hidden.words, hidden.draws)), strict=True)
        for where, originals, draws in parts:
            logits = masked_logits(self.head, states.index_select(0, where))
            total = total + functional.cross_entropy(logits, originals, reduction="sum")
            words.append(drawn(logits.detach(), draws))
        return total / hidden.of_step, torch.cat(words)

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write the encoder and its tokenizer.

        Args:
            folder: The folder.
            max_tokens: Number of tokens of the longest row.
        """
        self.encoder.model.save_pretrained(folder)
        save_tokenizer(folder, self.encoder, max_tokens)


def drawn(logits: Tensor, draws: Tensor) -> Tensor:
    """Sample a word from the distribution of each row by the inverse of its cumulative distribution, int64 [rows].

    Args:
        logits: [rows, vocabulary].
        draws: Uniform random numbers in [0, 1), float64 [rows].

    >>> drawn(torch.tensor([[0.0, 0.0]] * 3), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64))
    tensor([0, 1, 1])
    """
    ends = torch.softmax(logits.double(), dim=1).cumsum(1)
    targets = draws.double().to(ends.device).unsqueeze(1) * ends[:, -1:]
    return torch.searchsorted(ends, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def lower_layers(encoder: Encoder, layers: int) -> Encoder:
    """Return a copy of an encoder's lowest layers, which shares the encoder's word embeddings.

    Args:
        encoder: The encoder.
        layers: Number of layers.

    Raises:
        ConfigError: The encoder has fewer layers than that.
    """
    config: Any = copy.deepcopy(encoder.config)
    if not 1 <= layers <= encoder.num_layers:
        raise ConfigError(
            f"objective.generator_layers: expected 1 to {encoder.num_layers}, the encoder's layers, got {layers}"
        )
    keep_layers(config, layers, config.name_or_path)
    config._attn_implementation = None
    model: Any = build(config)
    model.load_state_dict(encoder.model.state_dict(), strict=False)
    model.set_input_embeddings(encoder.model.get_input_embeddings())
    model.train()
    lower = Encoder(model, encoder.tokenizer, encoder.execution)
    lower.source = encoder.source
    return lower
