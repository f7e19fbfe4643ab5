"""Attention modules of transformers whose queries and keys one kernel normalises and rotates (`rotary_heads`).

A module uses the kernel in packed passes on CUDA in half precision, if the kernel computes what the module's own code
computes (`rotary_probe`). Everywhere else the module's own code runs.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import Tensor, nn

from ranker.encoders.packed_attention import packed_attention
from ranker.encoders.rotary_heads import HeadNorms, rotary_heads
from ranker.encoders.rotary_probe import NORMS, PROJECTIONS, RotarySettings, rotary_settings

log = logging.getLogger(__name__)


def use_rotary_kernel(model: nn.Module) -> int:
    """Let a model's attention modules use `rotary_heads` where it can run; return how many do so.

    Args:
        model: The model; its modules have a reference to its `Packing`.
    """
    found, others = 0, 0
    module: Any
    for module in list(model.modules()):
        if isinstance(module, RotaryAttention) or any(getattr(module, name, None) is None for name in PROJECTIONS):
            continue
        own = rotary_settings(module)
        if own is None:
            others += 1
            continue
        siblings = getattr(module.q_proj, "siblings", None)
        module.rotary_settings = own
        module.one_product = siblings is not None and siblings.layers == [module.q_proj, module.k_proj, module.v_proj]
        kind: Any = type(module)
        module.__class__ = _rotary_class(kind)
        found += 1
    if found or others:
        log.info(
            "encoder: on CUDA in half precision, this package's kernel rotates the queries and keys of %d layers; %d "
            "layers run their own code",
            found, others,
        )  # fmt: skip
    return found


class RotaryAttention:
    """Forward pass of an attention module of transformers, which uses `rotary_heads` where it can."""

    packing: Any
    rotary_settings: RotarySettings
    one_product: bool
    head_dim: int
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the module's output [1, tokens, dim] and None; arguments as in the module's own forward."""
        current = self.packing.current
        if args or current is None or not current.kernels or not self._takes(options):
            own: tuple[Tensor, Tensor | None] = super().forward(*args, **options)  # type: ignore[misc]
            return own
        cos, sin = options.pop("position_embeddings")
        parts = self._heads(options.pop("hidden_states"), cos[0], sin[0], current.stacked and self.one_product)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        mask = options.pop("attention_mask", None)
        mixed, _ = packed_attention(self, query, key, value, mask, **(options | self.rotary_settings.options))
        return self.o_proj(mixed.flatten(2)), None

    def _takes(self, options: dict[str, Any]) -> bool:
        """Return whether whole heads are rotated, and no cache keeps keys; arguments of `forward`."""
        if any(options.get(name) is not None for name in ("cache", "past_key_values")):
            return False
        angles = options.get("position_embeddings")
        return angles is not None and angles[0].shape[0] == 1 and angles[0].shape[-1] == self.head_dim

    def _heads(self, states: Tensor, cos: Tensor, sin: Tensor, one_product: bool) -> list[Tensor]:
        """Return queries, keys and values, each [tokens, own heads, head size]."""
        dim, gains, epsilon = self.head_dim, [], self.rotary_settings.epsilon
        if epsilon is not None:
            gains = [getattr(self, name).weight for name in NORMS]
        if one_product:
            whole = self.q_proj.siblings.whole(states).squeeze(0)
            heads, key_heads = (layer.out_features // dim for layer in (self.q_proj, self.k_proj))
            norms = None if epsilon is None else HeadNorms(gains[0], gains[1], epsilon)
            return list(rotary_heads(whole, norms, cos, sin, heads, key_heads))
        results = []
        for number, layer in enumerate((self.q_proj, self.k_proj)):
            part = layer(states).squeeze(0)
            norms = None if epsilon is None else HeadNorms(gains[number], None, epsilon)
            results.append(rotary_heads(part, norms, cos, sin, part.shape[1] // dim, 0)[0])
        return [*results, self.v_proj(states).squeeze(0).unflatten(1, (-1, dim))]


@cache
def _rotary_class(base: type) -> type:
    return type(base.__name__, (RotaryAttention, base), {})
