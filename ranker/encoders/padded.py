"""Transformers' own forward over a padded batch: the path of every family, and of `encoder.ragged=false`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ranker.encoders.passes import ForwardPass
from ranker.encoders.ragged import RaggedLayout
from ranker.types import TokenBatch


def padded_forward(model: Any, batch: TokenBatch, pad_token_id: int) -> ForwardPass:
    """Pad a batch, run the model and remove the padding.

    Args:
        model: The transformers model.
        batch: The batch.
        pad_token_id: Token id for padding.
    """
    return ForwardPass(_states(model, batch, pad_token_id), batch.num_rows * batch.max_length)


def _states(model: Any, batch: TokenBatch, pad_token_id: int) -> Iterator[Tensor]:
    layout = RaggedLayout.of(batch)
    inputs = {
        "input_ids": torch.where(layout.mask, layout.pad(batch.tokens), pad_token_id),
        "attention_mask": layout.key_mask.long(),
    }
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = layout.pad(batch.segments)
    for states in model(**inputs, output_hidden_states=True).hidden_states:
        yield layout.unpad(states)
