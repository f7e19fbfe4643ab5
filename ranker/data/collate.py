"""Turn texts of the token stores into the token batches that a scorer reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ranker.data.list_rows import ListRows
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.template import Part, Template
from ranker.data.token_store import TokenStore
from ranker.data.window_rows import check_room, window_parts, with_row_ids, with_windows
from ranker.data.windows import Pairs, Windows
from ranker.errors import ConfigError
from ranker.types import RankBatch, TokenBatch


@dataclass(frozen=True)
class Collator:
    """Make the token batches that a scorer reads, from rows of the token stores.

    Args:
        queries: Token store of the queries.
        docs: Token store of the docs.
        reads: `pairs`, `texts` or `lists`, see `ScorerInputs`.
        pair: Layout of a pair.
        query: Layout of a single query in a sequence.
        doc: Layout of a single doc in a sequence.
        max_pair_tokens: Longest pair in tokens, special tokens included; only the doc of a pair is truncated to fit.
        max_query_tokens: Longest query in tokens, with a prefix, without special tokens.
        max_doc_tokens: Longest doc in tokens, with a prefix, without special tokens.
        by_query: See `ScorerInputs`.
        windows: How docs are cut into windows; each window is a row. None: a doc is one row.
        title_lengths: Number of tokens of each doc's title [docs of the store]; None: no window repeats the title.
        whole_lists: See `ScorerInputs`.
        list_rows: See `ScorerInputs`.
    """

    queries: TokenStore
    docs: TokenStore
    reads: str
    pair: Template
    query: Template
    doc: Template
    max_pair_tokens: int
    max_query_tokens: int
    max_doc_tokens: int
    by_query: bool = False
    windows: Windows | None = None
    title_lengths: np.ndarray | None = None
    whole_lists: bool = False
    list_rows: ListRows | None = None

    @classmethod
    def of(
        cls,
        inputs: ScorerInputs,
        queries: TokenStore,
        docs: TokenStore,
        limits: TextLimits,
        title_lengths: np.ndarray | None = None,
    ) -> Collator:
        """Make a collator whose limits are at most those of the encoder.

        Args:
            inputs: What the scorer reads.
            queries: Token store of the queries.
            docs: Token store of the docs.
            limits: Longest texts.
            title_lengths: Number of tokens of each doc's title, if windows repeat the title.

        Raises:
            ConfigError: The encoder's longest sequence has no room for a query and a doc, or for a window.
        """
        check_room(inputs, limits)
        pair, single = inputs.pair or Template.of(inputs.tokenizer, 2), Template.of(inputs.tokenizer, 1)
        query, doc = inputs.layouts or (single, single)
        positions = inputs.max_positions
        max_pair_tokens = min(positions, limits.pair or positions)
        before = [pair.affixes_of(text).prefix_tokens for text in range(2)]
        if max_pair_tokens < pair.num_special + sum(before) + 2:
            raise ConfigError(
                f"max_pair_tokens: expected at least {pair.num_special + sum(before) + 2} tokens for a pair"
                f"{' with its prompt' if pair.affixes else ''}, got {max_pair_tokens}"
            )
        for name, layout in (("query", query), ("doc", doc)):
            if min(positions, layout.max_tokens or positions) < layout.num_special + 1 or layout.fill_to > positions:
                raise ConfigError(
                    f"{name}: the longest row must be at least {layout.num_special + 1} tokens ({layout.num_special} "
                    f"special tokens and one text token), and rows may be filled to at most {positions} tokens; got "
                    f"a longest row of {layout.max_tokens or positions} tokens, filled to {layout.fill_to}"
                )
        if inputs.reads == "pairs":
            # At least one token is left for the doc, so that no query is too long for a pair
            max_query_tokens = min(limits.query + before[0], max_pair_tokens - pair.num_special - before[1] - 1)
            max_doc_tokens = min(limits.doc + before[1], positions - pair.num_special)
        else:
            max_query_tokens = _max_text_tokens(query, limits.query, positions)
            max_doc_tokens = _max_text_tokens(doc, limits.doc, positions)
        if inputs.windows is not None:
            reach = inputs.windows.reach
            max_doc_tokens = (pair.affixes_of(1) if inputs.reads == "pairs" else doc).prefix_tokens
            max_doc_tokens += limits.doc if reach is None else min(limits.doc, reach)
        return cls(
            queries, docs, inputs.reads, pair, query, doc, max_pair_tokens, max_query_tokens, max_doc_tokens,
            inputs.by_query, inputs.windows, title_lengths, inputs.whole_lists, inputs.list_rows,
        )  # fmt: skip

    def query_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens kept of each query, without special tokens, int64 [queries]."""
        layout = self.pair if self.reads == "pairs" else self.query
        return layout.kept(0, self.queries.lengths[rows], self.max_query_tokens)

    def doc_lengths(self, rows: np.ndarray, query_lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens kept of each doc, without special tokens, int64 [docs].

        Args:
            rows: Rows of the doc store [docs].
            query_lengths: Number of tokens of the query in each doc's pair [docs]; not used if the scorer reads texts.
        """
        if self.reads != "pairs":
            return self.doc.kept(0, self.docs.lengths[rows], self.max_doc_tokens)
        lengths = self.pair.kept(1, self.docs.lengths[rows], self.max_doc_tokens)
        if self.windows is not None:
            return lengths
        return np.minimum(lengths, self.max_pair_tokens - self.pair.num_special - query_lengths)

    def doc_sizes(self, doc_lengths: np.ndarray, query_lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each doc's rows, int64 [docs]; for windows, an upper bound (`Windows.sizes`).

        Args:
            doc_lengths: Number of tokens kept of each doc [docs], see `doc_lengths`.
            query_lengths: Number of tokens of the query in each doc's pairs [docs]; not used if the scorer reads texts.
        """
        pairs = self.reads == "pairs"
        if self.windows is None:
            return doc_lengths + query_lengths + self.pair.num_special if pairs else self.doc.row_lengths(doc_lengths)
        prefix = self.prefix_tokens[1]
        rows, tokens = self.windows.sizes(np.maximum(doc_lengths - prefix, 0))
        beside = prefix + (self.pair.num_special + query_lengths if pairs else self.doc.num_special)
        tokens = tokens + rows * beside + (rows - 1) * self.windows.title
        return tokens if pairs else np.maximum(tokens, rows * self.doc.fill_to)

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """Number of prompt tokens that the stores have before each query and before each doc."""
        if self.reads == "pairs":
            return self.pair.affixes_of(0).prefix_tokens, self.pair.affixes_of(1).prefix_tokens
        return self.query.prefix_tokens, self.doc.prefix_tokens

    def query_batch(self, rows: np.ndarray) -> TokenBatch:
        """Lay out single queries; `rows` [queries] are rows of the query store."""
        return self.query.lay_out([(self.queries, rows, self.query_lengths(rows))])

    def doc_batch(self, rows: np.ndarray) -> TokenBatch:
        """Lay out single docs; `rows` [docs] are rows of the doc store."""
        lengths = self.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64))
        if self.windows is None:
            return self.doc.lay_out([(self.docs, rows, lengths)])
        whole = Part(self.docs, rows, lengths)
        part, cut = window_parts(self.windows, whole, self.prefix_tokens[1], self.title_lengths)
        return with_windows(self.doc.lay_out([part]), cut)

    def _pair_batch(
        self, query_rows: np.ndarray, query_lengths: np.ndarray, doc_rows: np.ndarray, doc_lengths: np.ndarray
    ) -> TokenBatch:
        """Lay out pairs: one row for each pair, or for each window of its doc; all arguments are [docs]."""
        if self.windows is None:
            return self.pair.lay_out([(self.queries, query_rows, query_lengths), (self.docs, doc_rows, doc_lengths)])
        pairs = Pairs(self.queries, self.docs, query_rows, query_lengths, doc_rows, self.prefix_tokens)
        whole = Part(self.docs, doc_rows, doc_lengths)
        part, cut = window_parts(self.windows, whole, self.prefix_tokens[1], self.title_lengths, pairs)
        query = Part(self.queries, query_rows[cut.docs], query_lengths[cut.docs])
        return with_windows(self.pair.lay_out([query, part]), cut)

    def group_sizes(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each group's rows, int64 [groups].

        If the docs of a query share a prefix (`by_query`), the query and the special tokens before it count once.

        Args:
            query_rows: Rows of the query store [groups].
            doc_rows: Rows of the doc store [groups, docs], -1 where a group has no doc.
        """
        mask = doc_rows >= 0
        query_lengths = self.query_lengths(query_rows)
        doc_lengths = self.doc_lengths(np.where(mask, doc_rows, 0), query_lengths[:, None])
        if self.list_rows is not None:
            return self.list_rows.tokens(query_lengths, doc_lengths, mask)
        sizes = (self.doc_sizes(doc_lengths, query_lengths[:, None]) * mask).sum(axis=1)
        if self.by_query and self.reads == "pairs" and self.windows is None:
            sizes -= np.maximum(mask.sum(axis=1) - 1, 0) * (len(self.pair.specials[0]) + query_lengths)
        return sizes if self.reads == "pairs" else self.query.row_lengths(query_lengths) + sizes

    def collate(
        self, query_rows: np.ndarray, doc_rows: np.ndarray, labels: np.ndarray, group_ids: np.ndarray, share: float
    ) -> RankBatch:
        """Make a micro-batch of some groups.

        Args:
            query_rows: Rows of the query store [groups].
            doc_rows: Rows of the doc store [groups, docs], -1 where a group has no doc.
            labels: Label of each doc [groups, docs].
            group_ids: Index of each group in the optimizer step [groups].
            share: Number of groups of this micro-batch divided by the number of groups of the whole step.
        """
        mask = doc_rows >= 0
        flat_docs = doc_rows[mask]
        group_of_doc, slot_of_doc = np.nonzero(mask)
        query_lengths = self.query_lengths(query_rows)
        doc_lengths = self.doc_lengths(flat_docs, query_lengths[group_of_doc])
        # Row ids number the step's queries and docs group by group, so that an id does not depend on the split of the
        # step
        query_row_ids = torch.from_numpy((group_ids * (doc_rows.shape[1] + 1)).astype(np.int64))
        doc_row_ids = query_row_ids[group_of_doc] + 1 + torch.from_numpy(slot_of_doc)
        batches: dict[str, Any] = {}
        if self.reads == "pairs":
            texts = query_rows[group_of_doc], query_lengths[group_of_doc], flat_docs, doc_lengths
            batches["pairs"] = with_row_ids(self._pair_batch(*texts), doc_row_ids)
        else:
            batches["queries"] = replace(self.query_batch(query_rows), row_ids=query_row_ids)
            batches["docs"] = with_row_ids(self.doc_batch(flat_docs), doc_row_ids)
        return RankBatch(
            labels=torch.from_numpy(np.where(mask, labels, 0.0).astype(np.float32)),
            doc_mask=torch.from_numpy(mask),
            group_ids=torch.from_numpy(group_ids.astype(np.int64)),
            share=share,
            **batches,
        )


def _max_text_tokens(layout: Template, max_tokens: int, positions: int) -> int:
    """Return the largest number of stored tokens, prefix included, of a single text in a sequence."""
    return min(max_tokens + layout.prefix_tokens, min(positions, layout.max_tokens or positions) - layout.num_special)
