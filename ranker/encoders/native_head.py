"""The head of a family's own sequence classification model, applied to states that the encoder computed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ranker.encoders.alignment import align
from ranker.encoders.encoder import Encoder
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.text_model import model_class, place_of
from ranker.encoders.traits import one_row
from ranker.encoders.transformers_forward import padding_id
from ranker.errors import CheckpointError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # largest difference of logits divided by the largest logit; a wrong head differs by more than 1e-2
READS = {"first": "cls", "last": "last"}  # pooling whose result is the states that a head reads


def has_native_head(config: PretrainedConfig) -> bool:
    """Return whether transformers has a sequence classification model that reads the states of this encoder."""
    return type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and model_class(config) is AutoModel


class NativeHead(nn.Module):
    """A sequence classification model without its encoder, which turns states into logits.

    The model gets the states of all tokens, however the encoder computed them. A short test run finds which states it
    reads: those for which the gradient of a logit is not 0. Weights without a gradient, such as BigBird's pooler, are
    frozen.

    Args:
        whole: The sequence classification model, from which the encoder is removed.
        encoder: The encoder with the same weights.
        dropout: Rate of all dropout modules in the head.

    Attributes:
        reads: The tokens whose states the model reads: `first`, `last`, or `all`.

    Raises:
        CheckpointError: The logits differ from those of the whole model.
    """

    def __init__(self, whole: Any, encoder: Encoder, dropout: float = 0.0) -> None:
        super().__init__()
        whole.eval()
        # the head of a causal model reads the last token that is not padding
        whole.config.get_text_config().pad_token_id = padding_token_id(encoder)
        encoder.make_first_token_global()
        ids = encoder.tokenizer("a b c", "d e f g")["input_ids"]
        row = one_row(ids, encoder.model.get_input_embeddings().weight.device)
        whole.to(row.tokens.device)
        with torch.no_grad():
            expected = whole(input_ids=row.tokens.unsqueeze(0)).logits
        self.prefix = str(whole.base_model_prefix)
        setattr(whole, self.prefix, GivenStates(getattr(whole, self.prefix)))
        align(whole)  # without the encoder, whose weights are already aligned
        self.whole = whole
        self.reads = self._measured(row, encoder.dim)
        with torch.no_grad():
            states = _in_eval_mode(encoder, row)
            got = self(states, row)
        if (got - expected).abs().max() > TOLERANCE * expected.abs().max() + 1e-6:
            raise CheckpointError(
                f"model.head: expected own, since the classifier of {encoder.config.model_type} is more than a head on "
                "the encoder's states; got native"
            )
        for module in whole.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        whole.train()

    @classmethod
    def of(cls, encoder: Encoder, num_labels: int, dropout: float = 0.0) -> NativeHead:
        """Return the head stored with the encoder's weights. Weights that are missing there are random.

        Args:
            encoder: The encoder.
            num_labels: Number of logits.
            dropout: Dropout rate in the head.

        Raises:
            CheckpointError: The family has no such head.
        """
        config = copy.deepcopy(encoder.config)
        if not has_native_head(config):
            raise CheckpointError(
                f"model.head: expected own, since transformers has no sequence classification model for "
                f"{config.model_type} encoders; got native"
            )
        config.num_labels = num_labels
        config._attn_implementation = None
        if encoder.source is None:
            whole, missing = AutoModelForSequenceClassification.from_config(config), ["all"]
        else:
            folder, file = place_of(encoder.source)
            whole, info = AutoModelForSequenceClassification.from_pretrained(
                folder, **file, config=config, output_loading_info=True, dtype=torch.float32, local_files_only=True,
                trust_remote_code=encoder.execution.trust_remote_code, ignore_mismatched_sizes=True,
            )  # fmt: skip
            # the weights of a head with another number of labels have other sizes
            missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
        whole.base_model.load_state_dict(encoder.model.state_dict(), strict=False)
        head = cls(whole, encoder, dropout)
        random = [name for name, _ in head.whole.named_parameters() if missing == ["all"] or name in missing]
        log.info("head: %s's own, %s", config.model_type, f"random: {', '.join(random)}" if random else "trained")
        return head

    def forward(self, states: Tensor, batch: TokenBatch) -> Tensor:
        """Return logits [rows, labels] from the states of all tokens.

        Args:
            states: [tokens, dim].
            batch: The batch of these states.
        """
        if self.reads == "all":
            layout = RaggedLayout.of(batch)
            tokens = torch.where(layout.mask, layout.pad(batch.tokens), self._text_config.pad_token_id)
            return self._run(layout.pad(states), self._with_one_end(tokens), layout.mask.long())
        return self.of_pooled(states.index_select(0, self._edges(batch)), batch)

    def of_pooled(self, states: Tensor, batch: TokenBatch, rows: Tensor | None = None) -> Tensor:
        """Return logits [rows, labels] from the states [rows, dim] of the first or the last tokens (`reads`).

        Args:
            states: One state per row.
            batch: The batch of these states.
            rows: Indices of the batch's rows to which the states belong, int64; None: all rows.
        """
        edges = self._edges(batch) if rows is None else self._edges(batch).index_select(0, rows)
        tokens = batch.tokens.index_select(0, edges).unsqueeze(1)
        return self._run(states.unsqueeze(1), tokens, torch.ones_like(tokens))

    @property
    def _text_config(self) -> Any:
        return self.whole.config.get_text_config()

    def _with_one_end(self, tokens: Tensor) -> Tensor:
        """Replace all end-of-text tokens of a row except the last one, which mBART's head reads.

        mBART's head refuses rows with different numbers of these tokens, but the text of a doc may contain some.
        """
        end, padding = self._text_config.eos_token_id, self._text_config.pad_token_id
        if not isinstance(end, int) or end == padding:
            return tokens
        is_end = tokens == end
        other = next(token for token in range(3) if token not in (end, padding))
        return tokens.masked_fill(is_end & (is_end.flip(1).cumsum(1).flip(1) > 1), other)

    def _edges(self, batch: TokenBatch) -> Tensor:
        return batch.cu_seqlens[:-1] if self.reads == "first" else batch.cu_seqlens[1:] - 1

    def save(self, folder: Path, encoder: Encoder) -> None:
        """Write the whole sequence classification model, with the encoder's weights."""
        given: Any = getattr(self.whole, self.prefix)
        base, own = encoder.model, getattr(encoder.model, "pooler", None)
        if given.pooler is not None:
            base.pooler = given.pooler
        setattr(self.whole, self.prefix, base)
        try:
            self.whole.save_pretrained(folder)
        finally:
            setattr(self.whole, self.prefix, given)
            if given.pooler is not None:
                base.pooler = own

    def _run(self, states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        given: Any = getattr(self.whole, self.prefix)
        given.states = states
        try:
            logits: Tensor = self.whole(input_ids=tokens, attention_mask=mask).logits
        finally:
            given.states = None
        return logits

    def _measured(self, row: TokenBatch, dim: int) -> str:
        weight = next(self.whole.parameters())
        states = torch.randn(1, row.num_tokens, dim, generator=torch.Generator().manual_seed(0)).to(weight)
        states.requires_grad_()
        with torch.enable_grad():
            logits = self._run(states, row.tokens.unsqueeze(0), torch.ones_like(row.tokens).unsqueeze(0))
            weights = [weight for weight in self.whole.parameters() if weight.requires_grad]
            gradient, *others = torch.autograd.grad(logits.sum(), [states, *weights], allow_unused=True)
        for weight, other in zip(weights, others, strict=True):
            weight.requires_grad_(other is not None)  # DDP expects a gradient for each trained weight
        read = gradient[0].abs().sum(1).nonzero()[:, 0].tolist()
        return {(0,): "first", (row.num_tokens - 1,): "last"}.get(tuple(read), "all")


class GivenStates(nn.Module):
    """Replace the encoder in a sequence classification model: return states that were computed elsewhere.

    Args:
        base: The encoder. Its pooler is kept, since it belongs to the head.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.pooler = getattr(base, "pooler", None)
        if self.pooler is not None:
            self.pooler.requires_grad_(True)
        activation = getattr(base, "pooler_activation", None) or getattr(base, "activation", None)
        self.activation = activation if isinstance(self.pooler, nn.Linear) else None
        self.config = base.config
        self.states: Tensor | None = None

    @property
    def decoder(self) -> GivenStates:
        """The module that OPT's language model calls in place of its base."""
        return self

    def forward(self, *_args: Any, **_options: Any) -> BaseModelOutputWithPooling:
        """Return the given states and, if the family has a pooler, the pooler's output."""
        states, pooled = self.states, None
        assert states is not None
        if isinstance(self.pooler, nn.Linear):  # in ALBERT and BigBird, the activation is another module
            pooled = self.pooler(states[:, 0])
            pooled = pooled if self.activation is None else self.activation(pooled)
        elif self.pooler is not None:
            pooled = self.pooler(states)
        return _Output(last_hidden_state=states, pooler_output=pooled)


class _Output(BaseModelOutputWithPooling):
    """The output of a family's encoder. Values that are not set, such as a cache, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def padding_token_id(encoder: Encoder) -> int:
    """Return the padding token id of an encoder's tokenizer; if it has none, an id to use instead (`padding_id`)."""
    token: int | None = encoder.tokenizer.pad_token_id
    return padding_id(encoder.config) if token is None else token


def _in_eval_mode(encoder: Encoder, row: TokenBatch) -> Tensor:
    training = encoder.training
    states: Tensor = encoder.eval()(row)
    encoder.train(training)
    return states
