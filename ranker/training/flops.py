"""Count the floating-point operations of a training from the model's layers and the tokens that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ranker.encoders.causality import is_causal


def matmul_flops(
    config: Any, tokens: int, squares: float, last_layer_tokens: int | None = None, near: float | None = None
) -> float:
    """Return the floating-point operations of a transformer encoder's matrix products in a forward pass.

    Products with weights (queries, keys, values, output, both feed-forward matrices) take 2 l (4 d^2 + 2 d f)
    operations per token, for l layers of size d and feed-forward size f. Attention takes 4 l d n^2 per row of n tokens.
    ModernBERT has a third feed-forward matrix, the gate; its layers with a window count only token pairs in the window.
    Training takes three times as many operations, since the backward pass has two products for each forward product.
    Embeddings, norms, heads and padding are not counted.

    If the last layer computes only the first token of each row, its weights count for that token only. Its attention
    then takes 4 h d per token, because each of the h heads works on whole states. In ModernBERT's last layer, queries,
    keys and values count for all tokens, and attention takes 4 d per token.

    Args:
        config: A transformers configuration.
        tokens: Number of real tokens.
        squares: Sum over rows of the square of the number of tokens.
        last_layer_tokens: Number of tokens that the last layer computes; None: all.
        near: Sum over rows of the number of token pairs within the window (`near_pairs`); None: all pairs.

    >>> from transformers import BertConfig
    >>> config = BertConfig(hidden_size=4, num_hidden_layers=1, intermediate_size=8, num_attention_heads=2)
    >>> matmul_flops(config, tokens=3, squares=9.0), matmul_flops(config, tokens=3, squares=9.0, last_layer_tokens=1)
    (912.0, 352.0)
    """
    layers, dim = config.num_hidden_layers, config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", 4 * dim)
    rotary = config.model_type == "modernbert"
    attention, feed_forward = 4 * dim**2, (3 if rotary else 2) * dim * inner
    layer_types = config.layer_types if rotary else [None] * layers
    pairs = [squares if near is None or name != "sliding_attention" else near for name in layer_types]
    if last_layer_tokens in (None, tokens):
        return 2.0 * layers * (attention + feed_forward) * tokens + 4.0 * dim * sum(pairs)
    of_all = 3 * dim**2 if rotary else 0  # weights of the last layer that multiply all tokens
    last = 2.0 * of_all * tokens + 2.0 * (attention + feed_forward - of_all) * last_layer_tokens
    last += 4.0 * dim * (1 if rotary else config.num_attention_heads) * tokens
    return 2.0 * (layers - 1) * (attention + feed_forward) * tokens + 4.0 * dim * sum(pairs[:-1]) + last


def near_pairs(lengths: Tensor, window: int | None) -> Tensor:
    """Return the number of token pairs at most `window` apart, summed over rows, a float64 scalar.

    If `window` is None, all pairs of a row are counted.

    >>> import torch
    >>> near_pairs(torch.tensor([3, 1]), 1).item(), near_pairs(torch.tensor([3, 1]), None).item()
    (8.0, 10.0)
    """
    lengths = lengths.double()
    reach = lengths - 1 if window is None else (lengths - 1).clamp(max=window)
    return (lengths + reach * (2 * lengths - reach - 1)).sum()


@dataclass(frozen=True)
class LinearWeights:
    """Numbers of linear layers' weights that multiply each token. If a layer runs twice, its weights count twice.

    Args:
        trained: Number of weights with a gradient.
        frozen: Number of weights without a gradient, such as the base of adapters.
        causal: Whether a token attends only to itself and earlier tokens.
    """

    trained: float
    frozen: float
    causal: bool


def linear_weights(model: nn.Module) -> LinearWeights:
    """Count the linear layers (and convolutions over positions) of a transformers model, without its pooler.

    A layer that runs several times (ALBERT) counts each time. A layer of experts counts only the experts that read a
    token.

    Args:
        model: The model, with or without adapters.
    """
    config: Any = model.config
    counts = {True: 0.0, False: 0.0}
    runs = config.num_hidden_layers / config.num_hidden_groups if hasattr(config, "num_hidden_groups") else 1.0
    for name, module in model.named_modules():
        if "pooler" not in name and isinstance(module, (nn.Linear, nn.Conv1d, Conv1D)):
            weight: Any = module.weight
            counts[weight.requires_grad] += weight.numel() * (runs if "albert_layer" in name else 1.0)
    for name, weight in model.named_parameters():
        if weight.ndim == 3 and ".experts." in name:  # [experts, out, in]
            counts[weight.requires_grad] += weight.numel() * config.num_experts_per_tok / len(weight)
    return LinearWeights(counts[True], counts[False], is_causal(model))


def transformers_flops(config: Any, weights: LinearWeights, tokens: int, squares: float, near: float) -> float:
    """Return the floating-point operations of training a model whose layers transformers runs, forward and backward.

    A trained weight takes 6 operations per token: 2 in the forward pass, 2 for the gradient of its input and 2 for its
    own gradient. A frozen weight takes 4. Attention takes 12 h e per pair of tokens for h heads of size e, three times
    as many as in the forward pass alone. A causal model has n (n + 1) / 2 pairs in a row of n tokens. Embeddings,
    norms, heads, padding and recomputed layers (gradient checkpointing) are not counted.

    Args:
        config: A transformers configuration.
        weights: Numbers of weights of the model's linear layers.
        tokens: Number of real tokens.
        squares: Sum over rows of the square of the number of tokens.
        near: Sum over rows of the number of token pairs within the window, which reaches to both sides of a token.
    """
    config = getattr(config, "encoder", config)  # T5Gemma's encoder has a configuration of its own
    heads = getattr(config, "num_attention_heads", None) or 0
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    only = "sliding_attention" if isinstance(getattr(config, "sliding_window", None), int) else "full_attention"
    types = getattr(config, "layer_types", None) or [only] * config.num_hidden_layers
    counted = {"full_attention": squares, "sliding_attention": near}  # other layers have no products of token pairs
    found = [counted[name] for name in types if name in counted]
    pairs = sum((each + tokens) / 2 if weights.causal else each for each in found)
    return tokens * (6.0 * weights.trained + 4.0 * weights.frozen) + 12.0 * heads * size * pairs
