"""Choose the functions that run the layers of a batch, for models whose layers this package knows; log the reasons.

The paths, from the fastest to the slowest:

- this package's kernels, without padding, on CUDA in half precision;
- compiled layers, without padding, on CUDA in half precision;
- eager layers, without padding, on CUDA in half precision;
- eager layers with attention row by row, on a CPU;
- eager layers with padding only in attention, on CUDA in float32.

The choice depends only on the options, the model, the device and the batch's longest row, so a repeated or resumed step
uses the same path.
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
    short_attention,
    short_unavailable,
    triton_unavailable,
    unpadded_unavailable,
)
from ranker.encoders.compiled_layer import (
    compile_unavailable,
    compiled_dropout,
    compiled_layer,
    compiled_pre_norm_layer,
)
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.execution import Execution
from ranker.encoders.family import family_of, max_positions
from ranker.encoders.kernel_functions import list_tensors, triton_kernels, triton_list_kernels
from ranker.encoders.kernel_layer import kernel_layer
from ranker.encoders.layer import (
    LayerFunctions,
    kernel_average,
    linear_activation,
    linear_attention,
    linear_residual_norm,
    post_norm_layer,
)
from ranker.encoders.pre_norm_kernels import pre_norm_kernel_layer, triton_pre_norm_kernels
from ranker.encoders.pre_norm_layer import (
    PreNormFunctions,
    PreNormWeights,
    pre_norm_layer,
    rotary_library_attention,
    rotary_row_attention,
)
from ranker.encoders.pruned_heads import removed_heads
from ranker.encoders.ragged import TILE, RaggedLayout
from ranker.encoders.row_attention import row_attention, row_average
from ranker.encoders.stack import Log, RaggedPass
from ranker.errors import ConfigError


class LayerPath(NamedTuple):
    """The functions that run the layers of one batch.

    Args:
        run_layer: `post_norm_layer`, `compiled_layer` or `kernel_layer`; for ModernBERT `pre_norm_layer`,
            `compiled_pre_norm_layer` or `pre_norm_kernel_layer`.
        functions: The operations that `run_layer` calls.
        dropout: Dropout after the embeddings, a function like `hashed_dropout`.
        unpadded: Whether attention runs without padding.
        min_length: Maximum row lengths are rounded up to this value, or to a power of two if they are above it. Each
            new value compiles the layers again.
    """

    run_layer: Callable[..., Any]
    functions: Any
    dropout: Callable[[Tensor, Tensor, float], Tensor]
    unpadded: bool
    min_length: int

    @property
    def uses_kernels(self) -> bool:
        """Whether layers run through this package's kernels. Embeddings may then also do so."""
        return self.run_layer in (kernel_layer, pre_norm_kernel_layer)

    def packed_rows(self, layout: RaggedLayout) -> PackedRows:
        """Return the row boundaries for attention without padding."""
        max_length = max(self.min_length, 1 << (layout.batch.max_length - 1).bit_length())
        batch, lists = layout.batch, tuple[Tensor, ...]()
        if batch.lists is not None:
            lists = list_tensors(batch.lists, batch.max_list, batch.cu_seqlens, layout.row_indices, batch.list_size)
        return PackedRows(batch.cu_seqlens, layout.cu_keys, layout.key_indices, max_length, layout.blocks, lists)


def attention_is_unpadded(model: Any, device: torch.device, log: Log) -> bool:
    """Return whether attention runs without padding on this device in the present precision."""
    weight = model.get_input_embeddings().weight
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    reason = unpadded_unavailable(device, dtype)
    if reason:
        log("attention runs row by row" if device.type == "cpu" else f"padded in attention, because {reason}")
    # a padding row has up to TILE tokens, so the model needs as many positions
    return not reason and max_positions(model.config) >= TILE


def can_skip_other_tokens(model: Any, execution: Execution, unpadded: bool, attention_dropout: float) -> bool:
    """Return whether the last layer can compute only the states of first tokens.

    ModernBERT's last layer always can: the other tokens are dropped after attention. BERT's attention of first tokens
    (`first_token_attention`) without padding needs this package's kernel. With padding it needs attention dropout to be
    off, because dropping an attention weight would also have to scale the bias of the values.

    Args:
        model: A transformers model of a family with `Family.layers`.
        execution: Options.
        unpadded: Whether attention runs without padding.
        attention_dropout: Dropout rate of the last layer's attention weights.
    """
    if family_of(model.config).layers == "modernbert":
        return True
    if unpadded:
        return execution.attention != "library" and not triton_unavailable()
    return attention_dropout == 0


def lists_have_kernels(model: Any, execution: Execution, max_length: int) -> bool:
    """Return whether the layers of a batch of lists run through this package's kernels, on CUDA in half precision."""
    if family_of(model.config).layers != "bert":
        return False
    activation = model.encoder.layer[0].intermediate.intermediate_act_fn
    return not _no_kernels(model, activation, execution, _no_short_attention(model, execution, max_length))


def choose_path(
    model: Any,
    activation: Callable[[Tensor], Tensor],
    execution: Execution,
    max_length: int,
    device: torch.device | None,
    log: Log,
    has_lists: bool = False,
) -> LayerPath:
    """Choose how the layers of a batch run.

    Args:
        model: A transformers model with post-norm layers.
        activation: The activation of the model's feed-forward blocks.
        execution: Options.
        max_length: Length of the batch's longest row.
        device: Device of attention without padding; None: attention is padded.
        log: Reports the choice and its reasons.
        has_lists: Whether the batch has lists; without padding, lists need kernels (`lists_have_kernels`).

    Raises:
        ConfigError: An option requires a path that is not available.
    """
    if device is None:
        functions = LayerFunctions(
            linear_attention(row_attention), row_average, linear_activation(activation), linear_residual_norm
        )
        return LayerPath(post_norm_layer, functions, hashed_dropout, unpadded=False, min_length=0)
    no_short = _no_short_attention(model, execution, max_length)
    no_kernels = _no_kernels(model, activation, execution, no_short)
    if not no_kernels:
        log("layers run through this package's kernels; attention dropout is off in them")
        kernels = triton_list_kernels() if has_lists else triton_kernels()
        return LayerPath(kernel_layer, kernels, hashed_dropout, unpadded=True, min_length=512)
    name = f"torch's variable-length kernel, because {no_short}" if no_short else "the kernel for short rows"
    log(f"attention runs through {name}; attention dropout is off in it")
    log(f"norms and activations run without kernels of this package, because {no_kernels}")
    no_compile = _no_compile(execution, device, log)
    functions = LayerFunctions(
        linear_attention(library_attention if no_short else short_attention),
        kernel_average,
        linear_activation(activation),
        linear_residual_norm,
    )
    run_layer, dropout = (post_norm_layer, hashed_dropout) if no_compile else (compiled_layer, compiled_dropout)
    # the kernels of this package work on blocks of a row and do not read the maximum length
    return LayerPath(run_layer, functions, dropout, unpadded=True, min_length=64 if no_short else 512)


def choose_pre_norm_path(model: Any, run: RaggedPass) -> LayerPath:
    """Choose how the layers of a batch run, for models with ModernBERT's modules.

    Args:
        model: The model.
        run: The forward pass.

    Raises:
        ConfigError: An option requires a path that is not available.
    """
    activation, batch, execution = model.layers[0].mlp.act, run.layout.batch, run.execution
    if run.device is None:
        functions = PreNormFunctions(rotary_row_attention, activation)
        return LayerPath(pre_norm_layer, functions, hashed_dropout, unpadded=False, min_length=0)
    no_kernels = _no_pre_norm_kernels(model, execution)
    no_short = _no_short_attention(model, execution, batch.max_length)
    if not no_kernels:
        # torch's kernel has no windows if only some tokens are attended to; this package's supports rows of any length
        short = not no_short or batch.attended is not None
        name = "" if short else f"; attention through torch's variable-length kernel, because {no_short}"
        run.log(f"layers run through this package's kernels{name}; attention dropout is off in them")
        kernels = triton_pre_norm_kernels(short)
        return LayerPath(pre_norm_kernel_layer, kernels, hashed_dropout, unpadded=True, min_length=512 if short else 64)
    if batch.attended is not None and batch.max_length > model.config.sliding_window:
        raise ConfigError(
            "encoder.fused: expected auto for a model with windows if only a part of a row is attended to, got "
            f"kernels that can't run, because {no_kernels}"
        )
    run.log(f"layers run without kernels of this package, because {no_kernels}; attention dropout is off in them")
    functions = PreNormFunctions(rotary_library_attention, activation)
    if _no_compile(execution, run.device, run.log):
        return LayerPath(pre_norm_layer, functions, hashed_dropout, unpadded=True, min_length=64)
    return LayerPath(compiled_pre_norm_layer, functions, compiled_dropout, unpadded=True, min_length=64)


def _no_compile(execution: Execution, device: torch.device, log: Log) -> str:
    """Return why layers are not compiled; empty if they are."""
    no_compile = "encoder.compile=false" if execution.compile is False else compile_unavailable(device)
    if no_compile and execution.compile is True:
        raise ConfigError(f"encoder.compile: expected auto or false, got true, but {no_compile}")
    log(f"layers run {'eagerly, because ' + no_compile if no_compile else 'compiled'}")
    return no_compile


def _no_pre_norm_kernels(model: Any, execution: Execution) -> str:
    """Return why layers do not run through this package's kernels; empty if they do."""
    if execution.fused is False:
        return "encoder.fused=false"
    reason = triton_unavailable()
    if not isinstance(model.layers[0].mlp.act, GELUActivation):
        reason = reason or f"the activation is {model.config.hidden_activation}, not gelu"
    if PreNormWeights.of(model.layers[-1]).has_biases or model.final_norm.bias is not None:
        reason = reason or "layers have biases"
    if execution.fused is True and reason:
        raise ConfigError(f"encoder.fused: expected auto or false, got true, but {reason}")
    return reason


def _no_short_attention(model: Any, execution: Execution, max_length: int) -> str:
    """Return why attention does not run through the kernel for short rows; empty if it does."""
    if execution.attention == "library":
        return "encoder.attention=library"
    config = model.config
    reason = short_unavailable(config.hidden_size // config.num_attention_heads, max_length)
    if reason and execution.attention == "short":
        raise ConfigError(f"encoder.attention: expected auto or library, got 'short', but {reason}")
    return reason


def _no_kernels(model: Any, activation: Callable[[Tensor], Tensor], execution: Execution, no_short: str) -> str:
    """Return why layers do not run through this package's kernels; empty if they do."""
    if execution.fused is False:
        return "encoder.fused=false"
    if removed_heads(model.config):
        return "attention heads were removed"
    exact = isinstance(activation, GELUActivation)
    not_gelu = "" if exact else f"the activation is {type(activation).__name__}, not gelu"
    if execution.fused is True and (triton_unavailable() or not_gelu):
        raise ConfigError(f"encoder.fused: expected auto or false, got true, but {triton_unavailable() or not_gelu}")
    return triton_unavailable() or no_short or not_gelu
