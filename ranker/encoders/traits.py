"""Test at loading, with a few short rows, on which paths transformers' own forward pass of a model is correct.

A row's states must not depend on the other rows. Which paths ensure this depends on the code of the family.
So three rows run one by one, then together, packed and padded, and the states are compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.family import Family, max_positions
from ranker.encoders.transformers_forward import Request, TransformersForward
from ranker.errors import CheckpointError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

LENGTHS = (9, 3, 6)  # lengths of the rows; if the attention window is short, one more row is longer than the window
LONGEST = 300  # largest length of that row
TOLERANCE = 1e-3  # largest difference of states divided by the largest state; wrong paths differ by more than 1e-2


@dataclass(frozen=True)
class Traits:
    """How a model computes.

    Args:
        path: `packed`: all rows in one row without padding; `padded`: groups of rows of near lengths; `by_length`:
            groups of rows of equal length, because padding changes the states of other tokens.
        first_position: Position id of a row's first token on the packed path.
        dim: Size of a state.
        num_layers: Number of layers whose states the model returns.
        why_padded: Why rows are not packed; empty if they are.
        packs_unattended: Whether packed rows may have tokens to which no other token attends. If not, batches with such
            tokens are padded.
    """

    path: str
    first_position: int
    dim: int
    num_layers: int
    why_padded: str = ""
    packs_unattended: bool = True

    def described(self, model_type: str) -> str:
        """Return a line for the log."""
        if self.path == "packed":
            return f"rows are packed without padding into transformers' own forward ({model_type})"
        groups = "near lengths, padded" if self.path == "padded" else "equal length"
        return f"rows run in groups of {groups}, in transformers' own forward ({model_type}), because {self.why_padded}"


def measure(model: Any, forward: TransformersForward, token_ids: list[int], packed: bool, family: Family) -> Traits:
    """Find the fastest path on which the states of a row do not depend on the other rows.

    Args:
        model: The model, on any device.
        forward: Runs the model.
        token_ids: Ids of common tokens, which are repeated if a row needs more.
        packed: Whether the packed path is allowed.
        family: Properties of the model's family.

    Raises:
        CheckpointError: Not even a single row runs, or the states do not have the shape [tokens, dim].
    """
    if family.refused:
        raise CheckpointError(f"{_name(model)}: {model.config.model_type} models are not supported: {family.refused}")
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _measure(model, forward, token_ids, packed, family)
    finally:
        model.train(training)


def _measure(model: Any, forward: TransformersForward, token_ids: list[int], packed: bool, family: Family) -> Traits:
    lengths = [*LENGTHS]
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if packed and isinstance(window, int) and window + LENGTHS[0] <= min(LONGEST, max_positions(model.config)):
        lengths.append(window + LENGTHS[0])
    batch = _batch(token_ids, lengths, model.get_input_embeddings().weight.device)
    rows = [_batch_of(row) for row in batch.tokens.split(lengths)]
    try:
        alone = [torch.stack(list(forward.padded(model, Request(row, True)).states)) for row in rows]
    except Exception as error:  # the code of a family may raise any error
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{_name(model)}: expected a model that encodes a text of {LENGTHS[0]} tokens by itself, got "
            f"{type(error).__name__}: {reason}; {model.config.model_type} models are not supported"
        ) from error
    expected = torch.cat(alone, dim=1)
    dim, num_layers = expected.shape[2], len(expected) - 1
    why = family.why_padded or "encoder.ragged=false"
    if packed and family.path is None:
        why, first_position = _try_packed(model, forward, batch, expected)
        if not why:
            unattended = _try_unattended(model, forward, batch)
            return Traits("packed", first_position, dim, num_layers, packs_unattended=unattended)
    path = family.path
    if path is None:
        padded = torch.stack(list(forward.padded(model, Request(batch, True), shortest=0.01).states))
        path = "padded" if _same(padded, expected) else "by_length"
    return Traits(path, 0, dim, num_layers, why)


def _try_packed(model: Any, forward: TransformersForward, batch: TokenBatch, expected: Tensor) -> tuple[str, int]:
    """Return why packed rows do not work (empty if they do), and the position id of a row's first token."""
    config = model.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention reads chunks of a row", 0
    try:
        for first in dict.fromkeys((0, (getattr(config, "pad_token_id", None) or 0) + 1)):
            forward.first_position = first
            if _same(torch.stack(list(forward.packed(model, Request(batch, True)).states)), expected):
                return "", first
    except Exception as error:  # the code of a family may raise any error
        return " ".join(str(error).split())[:100] or type(error).__name__, 0
    return "its states of packed rows differ from those of each row alone", 0


def _try_unattended(model: Any, forward: TransformersForward, batch: TokenBatch) -> bool:
    """Find the position id of tokens to which no other token attends; return whether packed rows give right states.

    OPT's mask gives these tokens the position -1.
    """
    row = _batch_of(batch.tokens[: LENGTHS[0]])
    kept = LENGTHS[0] - 2
    row = replace(row, attended=torch.tensor([kept], dtype=torch.int32, device=row.tokens.device), num_attended=kept)
    expected = torch.stack(list(forward.padded(model, Request(row, True)).states))
    for position in (None, -1):
        forward.unattended_position = position
        if _same(torch.stack(list(forward.packed(model, Request(row, True)).states)), expected):
            return True
    forward.unattended_position = None
    return False


def _same(states: Tensor, expected: Tensor) -> bool:
    return bool(((states - expected).abs().amax() <= TOLERANCE * expected.abs().amax()).item())


def _batch(token_ids: list[int], lengths: list[int], device: torch.device) -> TokenBatch:
    tokens = torch.tensor([token_ids[i % len(token_ids)] for i in range(sum(lengths))], device=device)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return TokenBatch(tokens, torch.zeros_like(tokens), offsets, max(lengths))


def one_row(token_ids: list[int], device: torch.device) -> TokenBatch:
    """Return a batch with one row of these tokens."""
    return _batch_of(torch.tensor(token_ids, device=device))


def _batch_of(row: Tensor) -> TokenBatch:
    offsets = torch.tensor([0, len(row)], dtype=torch.int32, device=row.device)
    return TokenBatch(row, torch.zeros_like(row), offsets, len(row))


def _name(model: nn.Module) -> str:
    config: Any = model.config
    return config.name_or_path or f"{config.model_type} encoder"


def common_tokens(tokenizer: Any, num_embeddings: int) -> list[int]:
    """Return ids of ordinary tokens, without special tokens, for `measure`.

    Args:
        tokenizer: The tokenizer.
        num_embeddings: Number of rows of the embedding table.
    """
    special = set(tokenizer.all_special_ids)
    ids = [i for i in tokenizer.get_vocab().values() if i < num_embeddings and i not in special]
    ids = sorted(ids) or [0]
    step = max(1, len(ids) // sum(LENGTHS))
    return ids[::step][: sum(LENGTHS)]


def reads_segments(config: Any, tokenizer: Any) -> bool:
    """Return whether to pass segment ids: if the model has several, or has no stated number and the tokenizer does."""
    types = getattr(config, "type_vocab_size", None)
    return types > 1 if types is not None else "token_type_ids" in tokenizer.model_input_names
