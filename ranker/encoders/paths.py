"""The choice of a path for models with BERT's modules: which functions run the layers of one batch, and why.

Paths, fastest first: this package's kernels, compiled layers, eager layers (all three without padding, on CUDA in half
precision), eager layers with padding in attention only (CPU, float32). The choice depends on the options, the model,
the device and the batch's longest row alone, so a repeated or resumed step takes the same path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.activations import GELUActivation

from ranker.encoders.attention import (
    PackedRows,
    library_attention,
    padded_attention,
    padded_average,
    short_attention,
    short_unavailable,
    triton_unavailable,
    unpadded_unavailable,
)
from ranker.encoders.compiled_layer import compile_unavailable, compiled_dropout, compiled_layer
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.execution import Execution
from ranker.encoders.family import max_positions
from ranker.encoders.kernel_layer import Kernels, kernel_layer, triton_kernels
from ranker.encoders.layer import (
    LayerFunctions,
    kernel_average,
    linear_activation,
    linear_attention,
    linear_residual_norm,
    post_norm_layer,
)
from ranker.encoders.ragged import TILE, RaggedLayout
from ranker.errors import ConfigError

Log = Callable[[str], None]  # reports a line about the chosen path


class LayerPath(NamedTuple):
    """How the layers of one batch run.

    Args:
        run_layer: `post_norm_layer`, `compiled_layer` or `kernel_layer`.
        functions: The operations that `run_layer` calls.
        dropout: Dropout after the embeddings, as `hashed_dropout`.
        unpadded: Whether attention runs without padding.
        min_length: Maximum row lengths below this are rounded up to it, those above to a power of two. Each new value
            compiles the layers again.
    """

    run_layer: Callable[..., Tensor]
    functions: LayerFunctions | Kernels
    dropout: Callable[[Tensor, Tensor, float], Tensor]
    unpadded: bool
    min_length: int

    @property
    def uses_kernels(self) -> bool:
        """Whether layers run through this package's kernels; embeddings may, too."""
        return self.run_layer is kernel_layer

    def packed_rows(self, layout: RaggedLayout) -> PackedRows:
        """Return the row boundaries that attention without padding takes."""
        max_length = max(self.min_length, 1 << (layout.batch.max_length - 1).bit_length())
        return PackedRows(layout.batch.cu_seqlens, layout.cu_keys, layout.key_indices, max_length, layout.blocks)


def activation_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation of the feed-forward blocks, which all layers share."""
    return model.encoder.layer[0].intermediate.intermediate_act_fn


def attention_is_unpadded(model: Any, device: torch.device, log: Log) -> bool:
    """Return whether attention runs without padding on this device, in the precision in use."""
    weight = model.embeddings.word_embeddings.weight
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    reason = unpadded_unavailable(device, dtype)
    if reason:
        log(f"padded in attention, because {reason}")
    # a padding row has up to TILE tokens, so it needs as many positions
    return not reason and max_positions(model.config) >= TILE


def can_skip_other_tokens(model: Any, execution: Execution, unpadded: bool) -> bool:
    """Return whether the last layer can compute the states of first tokens alone (`first_token_attention`).

    Without padding only this package's kernel can. With padding it needs attention dropout to be off, because dropped
    attention weights would also have to scale the bias of the values.
    """
    if unpadded:
        return execution.attention != "library" and not triton_unavailable()
    attention = model.encoder.layer[-1].attention.self
    return not (attention.training and attention.dropout.p > 0)


def choose_path(model: Any, execution: Execution, max_length: int, device: torch.device | None, log: Log) -> LayerPath:
    """Choose how the layers of a batch run.

    Args:
        model: A transformers model with BERT's modules.
        execution: Options.
        max_length: The batch's longest row.
        device: Device of attention without padding; None: attention is padded.
        log: Reports the choice and its reasons.

    Raises:
        ConfigError: An option insists on a path that is not available.
    """
    activation = activation_of(model)
    if device is None:
        functions = LayerFunctions(
            linear_attention(padded_attention), padded_average, linear_activation(activation), linear_residual_norm
        )
        return LayerPath(post_norm_layer, functions, hashed_dropout, unpadded=False, min_length=0)
    no_short = _no_short_attention(model, execution, max_length)
    no_kernels = _no_kernels(model, execution, no_short)
    if not no_kernels:
        log("layers run through this package's kernels; attention dropout is off in them")
        return LayerPath(kernel_layer, triton_kernels(), hashed_dropout, unpadded=True, min_length=512)
    name = f"torch's variable-length kernel, because {no_short}" if no_short else "the kernel for short rows"
    log(f"attention runs through {name}; attention dropout is off in it")
    log(f"norms and activations run without kernels of this package, because {no_kernels}")
    no_compile = "encoder.compile=false" if execution.compile is False else compile_unavailable(device)
    if no_compile and execution.compile is True:
        raise ConfigError(f"encoder.compile: expected auto or false, got true, but {no_compile}")
    log(f"layers run {'eagerly, because ' + no_compile if no_compile else 'compiled'}")
    functions = LayerFunctions(
        linear_attention(library_attention if no_short else short_attention),
        kernel_average,
        linear_activation(activation),
        linear_residual_norm,
    )
    run_layer, dropout = (post_norm_layer, hashed_dropout) if no_compile else (compiled_layer, compiled_dropout)
    # the kernels of this package work on blocks of a row, and do not read the maximum length
    return LayerPath(run_layer, functions, dropout, unpadded=True, min_length=64 if no_short else 512)


def _no_short_attention(model: Any, execution: Execution, max_length: int) -> str:
    """Return why attention does not run through the kernel for short rows; empty if it does."""
    if execution.attention == "library":
        return "encoder.attention=library"
    config = model.config
    reason = short_unavailable(config.hidden_size // config.num_attention_heads, max_length)
    if reason and execution.attention == "short":
        raise ConfigError(f"encoder.attention: expected auto or library, got 'short', but {reason}")
    return reason


def _no_kernels(model: Any, execution: Execution, no_short: str) -> str:
    """Return why layers do not run through this package's kernels; empty if they do."""
    if execution.fused is False:
        return "encoder.fused=false"
    not_gelu = (
        ""
        if isinstance(activation_of(model), GELUActivation)
        else f"the activation is {model.config.hidden_act}, not gelu"
    )
    if execution.fused is True and (triton_unavailable() or not_gelu):
        raise ConfigError(f"encoder.fused: expected auto or false, got true, but {triton_unavailable() or not_gelu}")
    return triton_unavailable() or no_short or not_gelu
