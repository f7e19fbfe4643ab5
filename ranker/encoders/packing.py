"""The running forward pass of a transformers model: its rows, and the dropout of token states.

transformers does not tell a model's attention and dropout where rows begin, or which values to drop. Each module of the
model therefore has a reference to the model's `Packing`, from which it reads the running pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranker.encoders.dropout import HashedDropout, column_hashes, dropout_hashes
from ranker.encoders.family import family_of
from ranker.encoders.grouped_attention import GroupedRows
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.row_groups import RowGroup, row_groups
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.encoders.text_model import ATTENTION_DROPOUTS
from ranker.types import TokenBatch

_running: ContextVar[bool] = ContextVar("running", default=False)  # whether a packed pass of any model is running


def packed_pass_runs() -> bool:
    """Return whether a packed pass of any model is running."""
    return _running.get()


@dataclass
class Pass:
    """What attention and dropout need to know about one forward pass.

    Args:
        batch: The rows.
        layout: Row and position of each token.
        packed: Whether the model reads one row [1, tokens].
        hashes: Hashes that decide dropout, int32 [sites, rows, columns], for states [rows, columns, dim]. A site is a
            place in the model that has dropout. None if dropout is off, or if torch's own random generator draws the
            masks.
        seed: Seed of the hashes.
        prefixes: How the rows share prefixes. If set, `batch` and `layout` describe the segments (shared prefixes and
            remainders) instead of whole rows. None if rows do not share prefixes.
        rows: Row boundaries, if attention within rows runs without padding on CUDA; compiled layers read them.
        stacked: Whether adapted layers that read the same input are computed together, with stacked weights
            (`adapted_linear.Siblings`).
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
    """Holds the forward pass that a model is running. A model has exactly one `Packing`; `Packing.of` returns it.

    Args:
        model: The model; each of its modules gets a reference to this object.

    Attributes:
        current: The running pass; None if no pass is running.
        num_sites: Number of places in the model with dropout on token states (sites); None before `find_dropout`.
        own_implementation: The attention function with which the model was built.
        attention_dropout: Whether the configuration contains a dropout rate for attention weights. If it does not, no
            attention weight is dropped.
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
