"""Rows of windows: their tokens, the check that a window fits, and the row ids, on which dropout depends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import tensor_ranges
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.template import Part, Template
from ranker.data.windows import Cut, Pairs, Windows
from ranker.errors import ConfigError
from ranker.types import TokenBatch

# Difference between the row ids of consecutive windows of a doc. A step has fewer queries and docs, so all row ids are
# different. The first window has the id of the whole doc.
WINDOW_IDS = 2**24


def check_room(inputs: ScorerInputs, limits: TextLimits) -> None:
    """Check that a window fits into a row together with all other tokens of the row.

    Raises:
        ConfigError: The window does not fit, or BM25 would select windows for a model that reads docs without the
            query.
    """
    windows = inputs.windows
    if windows is None:
        return
    if inputs.reads != "pairs" and windows.select != "first":
        raise ConfigError(
            f"passages.select: expected first with a model that reads docs without the query, got {windows.select!r}"
        )
    rows, query = inputs.max_positions, 0
    if inputs.reads == "pairs":
        layout, rows = inputs.pair or Template.of(inputs.tokenizer, 2), min(rows, limits.pair or rows)
        query = limits.query + layout.affixes_of(0).prefix_tokens
        doc = layout.affixes_of(1).prefix_tokens
    else:
        layout = inputs.layouts[1] if inputs.layouts is not None else Template.of(inputs.tokenizer, 1)
        rows, doc = min(rows, layout.max_tokens or rows), layout.prefix_tokens
    room = rows - layout.num_special - query - doc - windows.title
    if windows.length > room:
        parts = [f"{layout.num_special + doc} special tokens and prompts"]
        parts += [f"a query of up to {query}"] if query else []
        parts += [f"a title of up to {windows.title}"] if windows.title else []
        longer = " raise max_pair_tokens or" if inputs.reads == "pairs" and rows < inputs.max_positions else ""
        raise ConfigError(
            f"passages.length: expected at most {room}, since a row of {rows} tokens also holds "
            f"{', '.join(parts)}; got {windows.length};{longer} lower it"
        )


def window_parts(
    windows: Windows, whole: Part, prefix_tokens: int, title_lengths: np.ndarray | None, pairs: Pairs | None = None
) -> tuple[Part, Cut]:
    """Return the tokens of a doc in the row of each window: the doc's prompt, a repeated title, and the window.

    Args:
        windows: How docs are cut.
        whole: The tokens that rows would take from docs without windows, a prompt included [docs].
        prefix_tokens: Number of prompt tokens before each doc of the store.
        title_lengths: Number of tokens of the title of each doc of the store; None: titles are not repeated.
        pairs: The docs with their queries, if queries decide which windows are kept.
    """
    prefix = np.minimum(whole.lengths, prefix_tokens)
    texts = whole.lengths - prefix
    cut = windows.cut(texts, pairs)
    heads = prefix[cut.docs]
    if title_lengths is not None:
        titles = np.minimum(np.minimum(title_lengths[whole.rows], windows.title), texts)
        heads = heads + np.where(cut.starts > 0, titles[cut.docs], 0)
    return Part(whole.store, whole.rows[cut.docs], cut.lengths, prefix[cut.docs] + cut.starts, heads), cut


def with_windows(batch: TokenBatch, cut: Cut) -> TokenBatch:
    """Add the number of windows of each doc to a batch of window rows."""
    return replace(batch, windows=torch.from_numpy(cut.counts), max_windows=int(cut.counts.max(initial=0)))


def with_row_ids(batch: TokenBatch, doc_ids: Tensor) -> TokenBatch:
    """Return a batch with row ids: `doc_ids` [docs], or for windows ids that are derived from `doc_ids`."""
    if batch.windows is None:
        return replace(batch, row_ids=doc_ids)
    numbers = tensor_ranges(0, batch.windows, batch.num_rows)
    return replace(batch, row_ids=doc_ids.repeat_interleave(batch.windows) + WINDOW_IDS * numbers)
