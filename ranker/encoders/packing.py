"""Attention and dropout of transformers' own models, in a packed pass or a pass over padded rows.

transformers calls the attention function that is registered under a model's attention implementation. In a packed
pass, the model reads one row [1, tokens] with all texts end to end. The attention function of this file reads the
boundaries of the rows from the model's `Packing`, to which each of the model's modules has a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ranker.encoders.attention import unpadded_unavailable
from ranker.encoders.dropout import HashedDropout, column_hashes, dropout_hashes
from ranker.encoders.family import family_of
from ranker.encoders.grouped_attention import GroupedRows, grouped_attention
from ranker.encoders.list_attention import list_attention
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.row_attention import attend_rows, precise, runs_by_row
from ranker.encoders.row_groups import RowGroup, row_groups
from ranker.encoders.shared_prefix import SharedPrefixes, attend_segments
from ranker.encoders.text_model import ATTENTION_DROPOUTS
from ranker.types import TokenBatch

IMPLEMENTATION = "packed_rows"  # name of the attention function in transformers' registry
LARGEST_HEAD = 256  # largest head size of torch's flash attention
_running: ContextVar[bool] = ContextVar("running", default=False)  # whether a packed pass of any model is running


@dataclass
class Pass:
    """What attention and dropout need to know about one forward pass.

    Args:
        batch: The rows.
        layout: Row and position of each token.
        packed: Whether the model reads one row [1, tokens].
        hashes: Dropout hashes, int32 [sites, rows, columns], for states [rows, columns, dim]; None: there is no
            dropout, or torch draws it.
        seed: Seed of the hashes.
        prefixes: How the rows share prefixes; `batch` and `layout` are then those of its segments. None: rows do not
            share prefixes.
        rows: Row boundaries, if attention within rows runs without padding on CUDA; compiled layers read them.
        stacked: Whether layers with adapters run stacked (`adapted_linear.Siblings`).
        kernels: Whether modules may use this package's kernels in place of their own code.
        last_only: Whether the pass returns only the last layer's states.
    """

    batch: TokenBatch
    layout: RaggedLayout
    packed: bool
    hashes: Tensor | None = None
    seed: int = 0
    prefixes: SharedPrefixes | None = None
    rows: GroupedRows | None = None
    stacked: bool = False
    kernels: bool = False
    last_only: bool = False

    @cached_property
    def groups(self) -> list[RowGroup]:
        """Groups of rows for padded attention."""
        return row_groups(self.batch.cu_seqlens)

    @cached_property
    def longest(self) -> int:
        """Upper bound of the row lengths: a power of two, so that code compiled for it can run many batches."""
        return max(64, 1 << (self.batch.max_length - 1).bit_length())


class Packing:
    """The running forward pass of a model. A model has exactly one `Packing`, which `Packing.of` returns.

    Args:
        model: The model; each of its modules gets a reference to this object.

    Attributes:
        current: The running pass; None if no pass is running.
        num_sites: Number of sites with dropout on token states; None before `find_dropout`.
        own_implementation: The attention function with which the model was built.
        attention_dropout: Whether the configuration has a dropout rate for attention weights; otherwise none is
            dropped.
        window_excess: See `Family`.
    """

    def __init__(self, model: Any) -> None:
        self.current: Pass | None = None
        self.num_sites: int | None = None
        self.own_implementation: str = model.config._attn_implementation
        self.attention_dropout = any(hasattr(model.config, key) for key in ATTENTION_DROPOUTS)
        self._calls: dict[int, int] = {}
        self._columns: dict[tuple[int, torch.device], Tensor] = {}
        self.window_excess = family_of(model.config).window_excess
        for module in model.modules():
            object.__setattr__(module, "packing", self)
            if not self.attention_dropout and isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0  # otherwise T5's attention drops its weights at the model's rate
            if hasattr(module, "relative_attention_bias") and hasattr(module, "compute_bias"):
                object.__setattr__(module, "compute_bias", _RowBias(module))

    @classmethod
    def of(cls, model: Any) -> Packing:
        """Return the model's packing; the first call creates it."""
        packing: Packing = getattr(model, "packing", None) or cls(model)
        return packing

    @contextmanager
    def running(self, forward: Pass) -> Iterator[None]:
        """Make a pass the running one while the context is open."""
        before, calls = self.current, self._calls
        self.current, self._calls = forward, {}
        token = _running.set(forward.packed)
        try:
            yield
        finally:
            _running.reset(token)
            self.current, self._calls = before, calls

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return two contexts, for the forward pass and for its recomputation (`context_fn` of checkpointing).

        This is a bound method, so in a deep copy of a model (DPR's second encoder) it belongs to the copy's packing.
        """
        return nullcontext(), nullcontext() if self.current is None else self.running(self.current)

    def hashes(self, layout: RaggedLayout, seed: int) -> Tensor:
        """Return the dropout hashes of all sites, int32 [sites, tokens]."""
        rows = layout.row_indices if layout.batch.row_ids is None else layout.batch.row_ids[layout.row_indices]
        return dropout_hashes(seed, rows, layout.position_ids, self.num_sites or 1)

    def next_hashes(self, module: HashedDropout, shape: torch.Size) -> Tensor | None:
        """Return the hashes of a dropout module's next call in the running pass, int32 [product of `shape`].

        Args:
            module: The module.
            shape: Shape of the states without dim: [rows, columns], or [columns, rows] in XLNet. Longformer has more
                columns than the pass, because it pads to whole windows. A tensor of any other shape is a table that
                does not depend on the batch, such as DeBERTa's relative positions. Its hashes depend only on the
                indices of its rows.
        """
        if self.current is None or self.current.hashes is None:
            return None
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        site = module.sites[call % len(module.sites)]
        hashes = self.current.hashes[site]
        if shape == hashes.shape:
            return hashes.flatten()
        if len(shape) == 2 and shape[0] == hashes.shape[0] and shape[1] > hashes.shape[1]:
            return functional.pad(hashes, (0, shape[1] - hashes.shape[1])).flatten()
        if shape == hashes.T.shape:
            return hashes.T.flatten()
        columns = torch.arange(shape.numel(), device=hashes.device)
        return dropout_hashes(self.current.seed, torch.zeros_like(columns), columns, site + 1)[site]

    def columns(self, width: int, device: torch.device) -> Tensor:
        """Return `column_hashes`, computed once for each width."""
        if (width, device) not in self._columns:
            self._columns[width, device] = column_hashes(width, device)
        return self._columns[width, device]

    def find_dropout(self, model: nn.Module, run: Callable[[], Any]) -> None:
        """Replace the model's dropout modules by hashed ones, once. Sites are numbered in the order of the calls.

        Args:
            model: The model.
            run: Runs the model on one row. Modules that drop attention weights [1, heads, ...] are not replaced.
        """
        if self.num_sites is not None:
            return
        sites: dict[Any, list[int]] = {}
        calls = iter(range(10**6))

        def record(module: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
            if inputs[0].dim() < 4:
                sites.setdefault(module, []).append(next(calls))

        dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        hooks = [module.register_forward_hook(record) for module in dropouts]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        for dropout, numbers in sites.items():
            hashed = HashedDropout(dropout.p, numbers, self).train(dropout.training)
            for parent in list(model.modules()):  # a module may have several parents
                for name in [name for name, child in parent._modules.items() if child is dropout]:
                    setattr(parent, name, hashed)
        self.num_sites = next(calls)


class _RowBias:
    """T5's relative position bias. In a packed pass, it is that of the longest row, [1, heads, longest, longest]."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *lengths: Any, **options: Any) -> Tensor:
        forward = self.module.packing.current
        if forward is not None and forward.packed and len(lengths) == 2:
            lengths = (forward.batch.max_length, forward.batch.max_length)
        return type(self.module).compute_bias(self.module, *lengths, **options)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention within rows: transformers calls this function for the implementation `packed_rows`.

    Args:
        module: The attention module.
        query: [1, heads, tokens, head size].
        key: [1, key heads, tokens, head size].
        value: [1, key heads, tokens, head size].
        attention_mask: None in a packed pass, which uses row boundaries; only used if the model itself is called.
        dropout: Dropout rate of attention weights. Only attention with padding applies it (`_grouped`).
        scaling: Factor of the logits; None: head size ** -0.5.
        options: `sliding_window`: tokens attend to tokens nearer than this; `softcap`: logits become softcap *
            tanh(logits / softcap); `position_bias`, [1, heads, longest, longest], is added to the logits.

    Returns:
        [1, tokens, heads, head size], and None for the attention weights.

    Raises:
        NotImplementedError: The model passes an option that this function does not support.
    """
    forward = module.packing.current
    rows = None if forward is None else forward.rows
    plain = not any(options.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if rows is None or not plain or query.shape[-1] > LARGEST_HEAD or key.shape[2] != query.shape[2]:
        return _attend_apart(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    rule = _rule(module, query, scaling, dropout, options)
    query, key, value = _states(query, key, value)
    mixed, _ = grouped_attention(
        query, key, value, rows.cu_seqlens, rows.cu_seqlens, rows.blocks, rows.longest,
        rows.takes(query.shape[-1], rule.causal), rule.causal,
        -1 if rule.window is None else rule.window - 1, rule.scale,
    )  # fmt: skip
    return mixed.unsqueeze(0), None


def _rule(module: Any, query: Tensor, scaling: float | None, dropout: float, options: dict[str, Any]) -> _Rule:
    causal = options.get("is_causal")
    window = options.get("sliding_window")
    return _Rule(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        bool(getattr(module, "is_causal", False)) if causal is None else bool(causal),
        None if window is None else window + module.packing.window_excess,
        options.get("softcap"),
        options.get("position_bias"),
        dropout if module.training and module.packing.attention_dropout else 0.0,
    )


def _states(*parts: Tensor) -> list[Tensor]:
    """Return queries, keys and values [1, heads, tokens, head size] as [tokens, heads, head size]."""
    states = [part[0].transpose(0, 1) for part in parts]
    kind = states[0].device.type
    # under autocast, rotary positions and norms return float32, but attention needs parts of one type
    if torch.is_autocast_enabled(kind) and len({part.dtype for part in states}) > 1:
        states = list(precise(*states)) if kind == "cpu" else states
    if torch.is_autocast_enabled(kind) and (kind == "cuda" or len({part.dtype for part in states}) > 1):
        states = [part.to(torch.get_autocast_dtype(kind)) for part in states]
    return states


@torch._dynamo.disable  # type: ignore[attr-defined]
def _attend_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float,
    scaling: float | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the same as `packed_attention`, outside of compiled code."""
    forward = module.packing.current
    if forward is None:  # the model itself was called, and not the encoder
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if options.get("s_aux") is not None or key.shape[2] != query.shape[2] or query.shape[0] != 1:
        raise NotImplementedError("attention sinks, cross-attention and caches have no packed form")
    rule = _rule(module, query, scaling, dropout, options)
    rate, states = rule.dropout, _states(query, key, value)
    if forward.prefixes is not None:
        return _with_prefixes(states, forward, rule).unsqueeze(0), None
    plain = rule.softcap is None and rule.bias is None
    if forward.batch.lists is not None:
        if rule.causal or not plain:
            raise NotImplementedError("causal attention, position biases and soft caps have no form for lists")
        window = None if rule.window is None else rule.window - 1
        query, key, value = states
        return list_attention(query, key, value, forward.layout, rule.scale, window, rate).unsqueeze(0), None
    by_row = plain and _all_read(forward, rule)
    if by_row and query.shape[-1] <= LARGEST_HEAD and not unpadded_unavailable(query.device, states[0].dtype):
        return _unpadded(states, forward, rule).unsqueeze(0), None
    if by_row and runs_by_row(query.device, rate):
        window = None if rule.window is None else rule.window - 1
        query, key, value = states
        return attend_rows(query, key, value, forward.layout, rule.scale, rule.causal, window).unsqueeze(0), None
    if query.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):  # as in `attend_rows`
            return _grouped(list(precise(*states)), forward, rule).to(query.dtype).unsqueeze(0), None
    return _grouped(states, forward, rule).unsqueeze(0), None


@dataclass(frozen=True)
class _Rule:
    """Which tokens attend to which, and how logits are computed; see `packed_attention`."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    bias: Tensor | None
    dropout: float


def _unpadded(states: list[Tensor], forward: Pass, rule: _Rule) -> Tensor:
    """Compute attention with torch's kernel for rows of different lengths, [tokens, heads, head size]."""
    indices = forward.layout.key_indices
    if indices is not None:
        states = [states[0], *(part.index_select(0, indices) for part in states[1:])]
    return _flash(states, forward, forward.layout.cu_keys, rule)


def _flash(states: list[Tensor], forward: Pass, cu_keys: Tensor, rule: _Rule) -> Tensor:
    """Compute attention with torch's kernel, to keys and values in the order of the rows."""
    window = -1 if rule.window is None else rule.window - 1
    mixed, _ = grouped_attention(
        states[0], states[1], states[2], forward.batch.cu_seqlens, cu_keys, cu_keys, forward.longest, False,
        rule.causal, window, rule.scale,
    )  # fmt: skip
    return mixed


def _with_prefixes(states: list[Tensor], forward: Pass, rule: _Rule) -> Tensor:
    """Compute attention from segments of rows to their prefixes and to themselves, [tokens, heads, head size]."""
    assert forward.prefixes is not None
    if not rule.causal or rule.bias is not None:
        raise NotImplementedError("attention in both directions and position biases have no prefix to share")
    query, key, value = states
    if rule.softcap is None and query.shape[-1] <= LARGEST_HEAD and not unpadded_unavailable(query.device, query.dtype):
        # the last key of each query is its own token, because the kernel aligns the ends of queries and keys
        indices = forward.prefixes.key_indices
        parts = [query, *(part.index_select(0, indices) for part in (key, value))]
        return _flash(parts, forward, forward.prefixes.cu_keys, rule)
    with torch.autocast(query.device.type, enabled=False):  # as in `attend_rows`
        parts = list(precise(*states)) if query.device.type == "cpu" else states
        attend = partial(_attend, rule=rule)
        return attend_segments(parts, forward.prefixes, attend, rule.window).to(query.dtype)


def _grouped(states: list[Tensor], forward: Pass, rule: _Rule) -> Tensor:
    """Compute attention with padding, in groups of rows of near lengths, [tokens, heads, head size]."""
    starts, attended = forward.batch.cu_seqlens[:-1].long(), forward.batch.attended
    results, indices = [], []
    for group in forward.groups:
        columns = torch.arange(group.longest, device=starts.device)
        real = columns < group.lengths.unsqueeze(1)
        cells = starts[group.rows].unsqueeze(1) + torch.minimum(columns, group.lengths.unsqueeze(1) - 1)
        padded = [part[cells].transpose(1, 2) for part in states]
        keys = real if attended is None else columns < attended[group.rows].unsqueeze(1)
        all_keys = attended is None and group.uniform
        mask = _mask(keys, all_keys, rule, columns)
        if mask is None or rule.window is None:
            mixed = _attend(padded, mask, rule).transpose(1, 2)
        else:  # padding and tokens that no other attends to may have no key in their window, and SDPA may return NaN
            lonely = ~mask.any(-1, keepdim=True)
            mixed = _attend(padded, mask | lonely, rule).masked_fill(lonely, 0.0).transpose(1, 2)
        real_cells = real.flatten().nonzero_static(size=int(group.lengths.sum()))[:, 0]
        results.append(mixed.flatten(0, 1).index_select(0, real_cells))
        indices.append(cells.flatten().index_select(0, real_cells))
    order = torch.cat(indices)
    numbers = torch.arange(len(order), device=order.device)
    return torch.cat(results).index_select(0, torch.empty_like(order).index_copy_(0, order, numbers))


def _all_read(forward: Pass, rule: _Rule) -> bool:
    """Return whether a row's keys are limited by `attended` alone or by causality and window alone, not by both.

    Kernels without padding align the last query of a row with its last key, so that they can't limit keys by both.
    """
    limited = rule.causal or (rule.window is not None and rule.window < forward.batch.max_length)
    return forward.batch.attended is None or not limited


def _mask(keys: Tensor, all_keys: bool, rule: _Rule, columns: Tensor) -> Tensor | None:
    """Return the keys that each query reads, bool [rows, 1, queries or 1, keys]; None if no mask is needed."""
    reach = len(columns) if rule.window is None else rule.window
    windowed = reach < len(columns)
    if all_keys and not windowed:
        return None
    mask = keys[:, None, None, :]
    distance = columns.unsqueeze(1) - columns
    if rule.causal:
        mask = mask & (distance >= 0)
    if windowed:
        mask = mask & (distance.abs() < reach)
    return mask


def _attend(states: list[Tensor], mask: Tensor | None, rule: _Rule) -> Tensor:
    """Compute attention over padded tensors [rows, heads, columns, head size]."""
    query, key, value = states
    if rule.softcap is None:
        bias = rule.bias
        if bias is not None:
            bias = bias[:, :, : query.shape[2], : query.shape[2]].to(query.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(query.dtype).min)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scale,
            is_causal=rule.causal and mask is None, enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    logits = rule.softcap * torch.tanh(query @ key.transpose(2, 3) * rule.scale / rule.softcap)
    if mask is None and rule.causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    weights = functional.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return functional.dropout(weights.to(value.dtype), rule.dropout) @ value


def row_mask(*args: Any, **options: Any) -> Tensor | None:
    """Return None in a packed pass, where row boundaries take the place of a mask; else SDPA's mask."""
    return None if _running.get() else sdpa_mask(*args, **options)


def register() -> None:
    """Register `packed_rows` in transformers."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, row_mask)
