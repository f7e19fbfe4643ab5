"""Types that several packages share: ragged token batches, rank batches, training steps, scorers and losses.

Axis names, in this order: batch (query groups), docs (docs of a group), tokens, dim. Masks are True for real entries
and False for padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

Qrels = dict[str, dict[str, int]]  # query_id -> doc_id -> relevance
Run = dict[str, dict[str, float]]  # query_id -> doc_id -> score


class Movable:
    """Base class of dataclasses of tensors, which Lightning and a DataLoader with `pin_memory` can move.

    Fields may be tensors, other `Movable`s, or tuples of them. Treat instances as immutable. They are not frozen,
    because Lightning's 64-true and bf16-true precision cannot convert frozen dataclasses.

    Attributes:
        host: The object in the host's memory of which this one is a copy on a device, for code that reads ids, masks
            and lengths on the host: reading them from a GPU would wait for all work before. None: unknown. Copies,
            `replace` and pickles do not keep it.
    """

    host: Self | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "host"}

    def _map(self, move: Callable[[Any], Any]) -> Self:
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, (Tensor, Movable)):
                changed[field.name] = move(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Movable):
                changed[field.name] = tuple(move(part) for part in value)
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Return a copy with every tensor on `device`; Lightning passes no `non_blocking`, so the default is True."""
        moved = self._map(lambda value: value.to(device, non_blocking=non_blocking))
        devices = {value.device.type for value in vars(self).values() if isinstance(value, Tensor)}
        if devices == {"cpu"} and torch.device(device).type != "cpu":
            moved.host = self
        return moved

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory. DataLoader silently skips custom types that lack this method."""
        return self._map(lambda value: value.pin_memory())


@dataclass
class TokenBatch(Movable):
    """Ragged token sequences: row r is `tokens[cu_seqlens[r]:cu_seqlens[r + 1]]`.

    Args:
        tokens: Token ids of all rows, one after another, int64 [tokens].
        segments: Segment (token type) ids, int64 [tokens].
        cu_seqlens: Cumulative row lengths, int32 [rows + 1]; the first is 0, the last is the number of tokens.
        max_length: Length of the longest row, a Python int, so that no kernel launch waits for the device.
        attended: Number of tokens at the start of each row to which the row's tokens attend, int32 [rows]. No token
            attends to the tokens after them (ColBERT's query expansion). None: tokens attend to all tokens of their
            row.
        num_attended: The sum of `attended`, a Python int.
        row_ids: Id of each row within the whole optimizer step, int64 [rows]. Dropout masks depend on these ids, so
            they do not depend on how the step is cut into micro-batches. None: 0, 1, 2, ... in this batch.
        windows: Number of consecutive rows of each doc if rows are windows of docs, int64 [docs]. None: each row is a
            whole text or pair.
        max_windows: Largest number in `windows`, a Python int.
        lists: Number of consecutive rows of each list, int64 [lists]. Every token of a row also attends to the first
            tokens of the other rows of its list. None: tokens attend only to their own row.
        max_list: Largest number in `lists`, a Python int.
        list_size: Number of rows to which list attention is scaled, see `list_attention`; None: it is not scaled.
    """

    tokens: Tensor
    segments: Tensor
    cu_seqlens: Tensor
    max_length: int
    attended: Tensor | None = None
    num_attended: int = 0
    row_ids: Tensor | None = None
    windows: Tensor | None = None
    max_windows: int = 0
    lists: Tensor | None = None
    max_list: int = 0
    list_size: int | None = None

    @property
    def num_texts(self) -> int:
        """Number of texts or pairs; each has one row, or several rows if it is cut into windows."""
        return self.num_rows if self.windows is None else self.windows.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows (sequences)."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows; a ragged batch has no padding."""
        return self.tokens.shape[0]


@dataclass
class RankBatch(Movable):
    """A micro-batch of query groups; a group is a query with its docs.

    A cross-encoder reads `pairs`; a bi-encoder reads `queries` and `docs`.

    Args:
        labels: Grades or a teacher's scores, float32 [batch, docs]; 0 where `doc_mask` is False.
        doc_mask: True where a group has a doc, bool [batch, docs]. `pairs` and `docs` have one text for each True cell,
            in row-major order.
        group_ids: Index of each group within the optimizer step, int64 [batch]. In evaluation: index of the query for a
            bi-encoder; for a cross-encoder, whose groups are single candidates, index of the candidate.
        share: Number of groups here divided by the number of groups of the whole step on all devices. The shares of a
            step sum to 1.
        pairs: One row for each doc, or for each window of a doc: query and doc in one sequence.
        queries: One row for each group.
        docs: One row for each doc, or for each window of a doc.
        set_sizes: In a mix of several sets: number of groups of each set; groups are in the order of the sets. Empty:
            there is a single set.
    """

    labels: Tensor
    doc_mask: Tensor
    group_ids: Tensor
    share: float
    pairs: TokenBatch | None = None
    queries: TokenBatch | None = None
    docs: TokenBatch | None = None
    set_sizes: tuple[int, ...] = ()


@dataclass
class Contrast(Movable):
    """Labels and masks of a whole optimizer step for in-batch negatives, equal on every device.

    The axis `docs` has the real docs of the step, group by group.

    Args:
        labels: Label of each doc in its own group, float32 [docs].
        owners: Index of each doc's group, ascending, int64 [docs].
        mask: True where a doc is ranked for a query, bool [groups, docs] (`ranker.data.contrast.contrast`).
        positive: True where a doc is relevant for the query of its own group, bool [docs]. This differs from
            `labels > 0`: a negative with a grade below the relevance threshold has a label above 0.
    """

    labels: Tensor
    owners: Tensor
    mask: Tensor
    positive: Tensor


@dataclass
class TrainStep(Movable):
    """The work of one optimizer step on this device.

    Args:
        epoch: Epoch, from 0.
        index: Index of the step within its epoch, from 0.
        micro_batches: The micro-batches of this device; empty if other devices have all groups.
        num_groups: Number of groups of the whole step, over all devices.
        num_docs: Number of docs of the whole step, over all devices.
        contrast: Labels and masks for in-batch negatives; None: the training has no in-batch negatives.
        seeds: torch's seed of each micro-batch, for a step that is repeated on another device; empty: the module
            computes the seeds.
        set_groups: In a mix of several sets: number of groups of each set in the whole step. Empty: there is a single
            set.
        round: Index of the round of mined negatives that the groups have, see `ranker.data.refreshed`. 0: the negatives
            are those of the data.
    """

    epoch: int
    index: int
    micro_batches: tuple[RankBatch, ...]
    num_groups: int
    num_docs: int
    contrast: Contrast | None = None
    seeds: tuple[int, ...] = ()
    set_groups: tuple[int, ...] = ()
    round: int = 0


class Loss(Protocol):
    """Return the mean over groups of each group's own value, a scalar. All inputs are [batch, docs].

    Three class attributes are True if left out. `pairwise = False` declares that the loss computes no tensor
    [batch, docs, docs]. With in-batch negatives, all other losses are called with few groups at a time.
    `needs_negatives = False` declares that the loss learns from a group of relevant docs alone; for other losses,
    `batch.docs` must be larger than `batch.positives`. `sorts_all = False` declares that the loss learns which docs are
    best, but not their order. Two more attributes are False if left out. With `against_reference = True` the training
    subtracts a frozen reference's scores from the scores (`ranker.training.loss_inputs`). With `draws = True` it also
    passes the step's `seed` and the `group_ids` [batch] to the loss.
    """

    def __call__(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor: ...
