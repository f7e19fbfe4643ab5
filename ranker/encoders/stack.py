"""The interface between a forward pass over ragged rows and a model's embeddings and layers.

`post_norm_stack` (BERT) and `pre_norm_stack` (ModernBERT) implement `Stack`; `ragged_forward` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranker.encoders.dropout import dropout_hashes
from ranker.encoders.execution import Execution
from ranker.encoders.passes import Begin, Output
from ranker.encoders.ragged import RaggedLayout
from ranker.hashing import mix

Log = Callable[[str], None]  # writes a line about the chosen path to the log


@dataclass(frozen=True)
class RaggedPass:
    """One forward pass.

    Args:
        layout: Layout of the batch.
        execution: Options.
        output: States to return.
        unpadded: Whether attention runs without padding.
        seed: Seed of the dropout masks, an int64 scalar tensor in a CUDA graph; None: drawn from torch's generator.
        ids_in_table: Whether the word table has a row for every token id of the tokenizer.
        log: Writes a line about the chosen path to the log.
        begin: The point from which the pass continues; None: it begins at the embeddings.
        skipped: Indices of the layers that this pass leaves out.
    """

    layout: RaggedLayout
    execution: Execution
    output: Output
    unpadded: bool
    seed: int | Tensor | None
    ids_in_table: bool
    log: Log
    begin: Begin | None = None
    skipped: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device | None:
        """The device of attention without padding; None: attention is padded."""
        return self.layout.batch.tokens.device if self.unpadded else None

    @property
    def first_tokens(self) -> Tensor:
        """Index of each row's first token, int32 [rows]."""
        firsts = self.layout.batch.cu_seqlens[:-1]
        if not self.unpadded:
            return firsts
        # `pad_to_tiles` has added at least one padding row, so there are at least two rows; compiled code would make a
        # number of 1 a constant. An empty padding row starts after the last token, so its index is clamped.
        return firsts.clamp(max=self.layout.batch.num_tokens - 1)

    def selected(self, is_last: bool) -> Tensor | None:
        """Return the indices of the tokens whose states a layer returns, like `first_tokens`; None: all tokens."""
        return self.first_tokens if is_last and self.output is Output.FIRST_TOKENS else None

    def hashes(self, sites: int) -> Tensor:
        """Return the dropout hashes for a number of sites (places with dropout in the model), int32 [sites, tokens]."""
        batch, rows = self.layout.batch, self.layout.row_indices
        seed = draw_seed(self.seed) if not isinstance(self.seed, Tensor) else self.seed
        return dropout_hashes(
            seed, rows if batch.row_ids is None else batch.row_ids[rows], self.layout.position_ids, sites
        )

    def state_dtype(self, weight: Tensor) -> torch.dtype:
        """Return the precision of the states between layers."""
        autocast = self.unpadded and torch.is_autocast_enabled("cuda")
        return torch.get_autocast_dtype("cuda") if autocast else weight.dtype

    def run(self, layer: Callable[..., Any], *arguments: Any) -> Any:
        """Run a layer. With `checkpointing`, its activations are recomputed in the backward pass."""
        if not (self.execution.checkpointing and torch.is_grad_enabled()):
            return layer(*arguments)
        # dropout by hash can be repeated without saved state; only attention with padding draws random numbers
        return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=not self.unpadded)


class Stack(Protocol):
    """The embeddings and layers of one kind of model."""

    def rates(self, model: Any) -> tuple[float, ...]:
        """Return the dropout rates in use, except those of attention weights."""
        ...

    def attention_dropout(self, model: Any) -> float:
        """Return the dropout rate in use for the last layer's attention weights."""
        ...

    def weights_per_layer(self, config: Any) -> int:
        """Return the number of a layer's weights that multiply each token."""
        ...

    def states(self, model: Any, run: RaggedPass) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, or only the last states, [tokens, dim]."""
        ...


def left_out(layer: nn.Module, states: Tensor) -> Tensor:
    """Return the states unchanged, with a gradient of 0 for the weights of a layer that is left out.

    On several devices, every weight needs a gradient. An optimizer treats a gradient of 0 differently from a missing
    one, so without this function the result would depend on the number of devices.
    """
    if not torch.is_grad_enabled():
        return states
    zeros = [weight.view(-1)[0] * 0.0 for weight in layer.parameters() if weight.requires_grad]
    return states + torch.stack(zeros).sum().to(states.dtype) if zeros else states


def layers_to_skip(rate: float, layers: int, seed: int) -> frozenset[int]:
    """Return the indices of layers that a training pass leaves out (LayerDrop, Fan et al., 2020, arXiv:1909.11556).

    Each layer except the last is left out with the given probability. The draw depends only on the optimizer step's
    seed, so all micro-batches of a step on all devices leave out the same layers.

    Args:
        rate: The probability.
        layers: Number of layers.
        seed: The seed.
    """
    if not rate:
        return frozenset()
    return frozenset(number for number in range(layers - 1) if int(mix(seed, number, layers)) < rate * 2**64)


def draw_seed(seed: int | None) -> int:
    """Return the seed, or draw one from torch's generator."""
    return int(torch.randint(2**62, ())) if seed is None else seed
