"""How an optimizer step is cut: which groups, which device, which micro-batch; and the token batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ranker.data.sampling import mix
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError, DataError
from ranker.types import RankBatch, TokenBatch


def deal(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Deal items to bins, longest first, each to the lightest bin; returns positions per bin.

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    load, out = [0] * bins, [[] for _ in range(bins)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(bins), key=lambda b: (load[b], b))
        load[lightest] += sizes[item]
        out[lightest].append(item)
    return out


def fill(order: np.ndarray, sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Cut `order` into runs of at most `max_tokens`; an item over the budget stands alone.

    >>> fill(np.array([3, 1, 2]), np.array([5, 4, 9]), 10)
    [array([3, 1]), array([2])]
    """
    batches, start, load = [], 0, 0
    for i, size in enumerate(sizes.tolist()):
        if load + size > max_tokens and i > start:
            batches.append(order[start:i])
            start, load = i, 0
        load += size
    return [*batches, order[start:]] if len(order) else batches


_IN_MEMORY = 1 << 24


@lru_cache(maxsize=2)
def _order(num_groups: int, seed: int, epoch: int) -> np.ndarray | HashedOrder:
    """The epoch's order of groups; of very many (MS MARCO's triples) no device holds a list."""
    return (
        np.random.default_rng([seed, epoch]).permutation(num_groups)
        if num_groups <= _IN_MEMORY
        else HashedOrder(num_groups, seed, epoch)
    )


class HashedOrder:
    """A shuffle of `range(size)` that is computed where it is read: a Feistel cipher that walks on while it is out of range.

    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 3; the round function is `mix`.

    >>> order = HashedOrder(1000, seed=0, epoch=0)
    >>> sorted(order[0:1000].tolist()) == list(range(1000)), order[10:12].tolist() == order[0:1000][10:12].tolist()
    (True, True)
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))

    def __getitem__(self, part: slice) -> np.ndarray:
        values = self._enciphered(np.arange(*part.indices(self.size), dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._enciphered(values[outside])
        return values.astype(np.int64)

    def _enciphered(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for number in range(4):
            left, right = right, left ^ (mix(self.seed, self.epoch, number, right) & mask)
        return left << self._half | right


@dataclass(frozen=True)
class StepPlan:
    """The optimizer steps of an epoch, fixed by the config alone; devices and memory only decide how a step is cut.

    Args:
        num_groups: Groups in the training set.
        queries: Groups per optimizer step, over all devices; an epoch's last step may have fewer.
        max_tokens: Token budget of a micro-batch on one device.
        seed: Seed of the shuffle.
        min_micro_batches: Cut each device's part into at least this many micro-batches.
    """

    num_groups: int
    queries: int
    max_tokens: int
    seed: int = 0
    min_micro_batches: int = 1

    def __len__(self) -> int:
        return -(-self.num_groups // self.queries)

    def groups(self, epoch: int, step: int) -> np.ndarray:
        """The step's groups, in the same order on every device."""
        return _order(self.num_groups, self.seed, epoch)[step * self.queries : (step + 1) * self.queries]

    def cut(self, sizes: Sequence[int], rank: int, world: int) -> list[list[int]]:
        """This device's micro-batches, as places in the step; [] where other devices got all groups.

        Args:
            sizes: Tokens of each group of the step.
            rank: This device.
            world: Number of devices.

        Raises:
            DataError: A single group is over the budget.
        """
        if max(sizes) > self.max_tokens:
            raise DataError(
                f"batch.max_tokens: expected at least {max(sizes)}, the tokens of the largest query group, got {self.max_tokens}; "
                "raise it, or lower batch.docs or max_doc_tokens"
            )
        mine = deal(sizes, world)[rank]
        own = [sizes[place] for place in mine]
        bins = max(self.min_micro_batches, -(-sum(own) // self.max_tokens))
        while any(sum(own[i] for i in part) > self.max_tokens for part in deal(own, bins)):
            bins += 1
        return [sorted(mine[i] for i in part) for part in deal(own, bins) if part]


@dataclass(frozen=True)
class Template:
    """The special tokens around texts, read off the tokenizer itself: `[CLS] a [SEP] b [SEP]` or `<s> a </s></s> b </s>`.

    Args:
        specials: Special ids before the first text, after it, (and after the second).
        segments: Segment id of each text.
        fill_to: Shorter rows are filled up to this many tokens at their end (ColBERT's query expansion); 0 fills
            nothing.
        fill_token: What they are filled with.
        attend_fill: Whether tokens attend to the filling.
        max_tokens: Longest row; None: what the encoder takes.
        prefix: Put before each text before it is tokenized, where the tokenizer would cut prompt and text otherwise
            than together; the token store holds both then.
        prefix_tokens: Tokens that `prefix` begins each text of the store with.
    """

    specials: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    fill_to: int = 0
    fill_token: int = 0
    attend_fill: bool = True
    max_tokens: int | None = None
    prefix: str = ""
    prefix_tokens: int = 0

    @classmethod
    def of(cls, tokenizer: Any, texts: int) -> Template:
        """Read the layout of 1 or 2 texts off a fast tokenizer."""
        encoded = tokenizer(*(["a", "b"][:texts]), return_token_type_ids=True)
        owners, ids, kinds = (
            encoded.sequence_ids(),
            encoded["input_ids"],
            encoded.get("token_type_ids") or [0] * len(encoded["input_ids"]),
        )
        specials: list[list[int]] = [[]]
        segments = []
        for place, owner in enumerate(owners):
            if owner is None:
                specials[-1].append(ids[place])
            elif owner == len(specials) - 1:
                specials.append([])
                segments.append(kinds[place])
        return cls(tuple(map(tuple, specials)), tuple(segments))

    @property
    def num_special(self) -> int:
        """Special tokens of a whole sequence."""
        return sum(map(len, self.specials))

    def with_prompt(self, tokens: Sequence[int], prefix: str = "", prefix_tokens: int = 0) -> Template:
        """The same layout with tokens of a prompt before the first text, and text that is tokenized together with it."""
        specials = ((*self.specials[0], *tokens), *self.specials[1:])
        return replace(self, specials=specials, prefix=prefix, prefix_tokens=prefix_tokens)

    @property
    def num_added(self) -> int:
        """Tokens of a row beside those of its texts: special ones and the prompt's."""
        return self.num_special + self.prefix_tokens

    def row_lengths(self, text_lengths: np.ndarray) -> np.ndarray:
        """Tokens of rows whose texts have so many, special tokens and filling included."""
        return np.maximum(text_lengths + self.num_special, self.fill_to)

    def lay_out(self, parts: Sequence[tuple[TokenStore, np.ndarray, np.ndarray]]) -> TokenBatch:
        """Copy stored tokens into one ragged batch.

        Args:
            parts: For each text its store, the rows to take [n] and how many tokens of each [n].
        """
        rows = len(parts[0][1])
        blocks = [np.full(rows, len(self.specials[0]))]
        for (_, _, lengths), after in zip(parts, self.specials[1:], strict=True):
            blocks += [lengths, np.full(rows, len(after))]
        real = np.sum(blocks, axis=0)
        widths = np.stack([*blocks, np.maximum(self.fill_to - real, 0)], axis=1)
        starts = np.cumsum(widths.ravel()).reshape(widths.shape) - widths
        total = int(widths.sum())
        # whatever is not written below is filling
        tokens, segments = np.full(total, self.fill_token, dtype=np.int64), np.zeros(total, dtype=np.int64)
        for i, special in enumerate(self.specials):
            segment = self.segments[max(i - 1, 0)]
            for j, token in enumerate(special):
                tokens[starts[:, 2 * i] + j] = token
                segments[starts[:, 2 * i] + j] = segment
        for i, (store, text_rows, lengths) in enumerate(parts):
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            at = np.repeat(starts[:, 2 * i + 1], lengths) + within
            tokens[at] = store.tokens[np.repeat(store.offsets[text_rows], lengths) + within]
            segments[at] = self.segments[i]
        row_lengths = widths.sum(axis=1)
        unread = self.fill_to > 0 and not self.attend_fill
        return TokenBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(segments),
            torch.from_numpy(np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int32)),
            int(row_lengths.max()),
            attended=torch.from_numpy(real.astype(np.int32)) if unread else None,
            num_attended=int(real.sum()) if unread else 0,
        )


@dataclass(frozen=True)
class Collator:
    """Make the token batches that a scorer reads, from rows of the stores.

    Args:
        queries: Token store of the queries.
        docs: Token store of the docs.
        reads: What the scorer reads: `pairs` (query and doc in one sequence) or `texts` (queries and docs apart).
        pair: Layout of a pair.
        query: Layout of a query by itself.
        doc: Layout of a doc by itself.
        max_pair_tokens: Longest pair, special tokens included; the doc is cut, never the query.
        max_query_tokens: Longest query in a pair or by itself, special tokens not counted, a prefix counted.
        max_doc_tokens: Longest doc, special tokens not counted, a prefix counted.
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

    @classmethod
    def of(
        cls, tokenizer: Any, reads: str, queries: TokenStore, docs: TokenStore, positions: int, max_query_tokens: int, max_doc_tokens: int,
        max_pair_tokens: int | None = None, layouts: tuple[Template, Template] | None = None,
    ) -> Collator:  # fmt: skip
        """Fit the limits to the encoder's positions.

        Args:
            tokenizer: The encoder's.
            reads: What the scorer reads, `pairs` or `texts`.
            queries: Token store of the queries.
            docs: Token store of the docs.
            positions: Longest sequence that the encoder takes.
            max_query_tokens: Longest query, special tokens not counted.
            max_doc_tokens: Longest doc, special tokens not counted.
            max_pair_tokens: Longest pair, special tokens included; None: `positions`.
            layouts: The scorer's own layouts of a query and of a doc by themselves; None: the tokenizer's.

        Raises:
            ConfigError: The positions leave no room for a query and a doc.
        """
        pair, single = Template.of(tokenizer, 2), Template.of(tokenizer, 1)
        query, doc = layouts or (single, single)
        longest = min(positions, max_pair_tokens or positions)
        if longest < pair.num_special + 2:
            raise ConfigError(
                f"max_pair_tokens: expected at least {pair.num_special + 2} tokens for a pair, got {longest}"
            )
        for name, layout in (("query", query), ("doc", doc)):
            if min(positions, layout.max_tokens or positions) < layout.num_special + 1 or layout.fill_to > positions:
                raise ConfigError(
                    f"{name}: expected room for a token beside {layout.num_special} special ones and at most {positions} tokens in all, "
                    f"got rows of {layout.max_tokens or positions}, filled up to {layout.fill_to}"
                )
        return cls(
            queries,
            docs,
            reads,
            pair,
            query,
            doc,
            longest,
            # one token at least is left for the doc, so that no query, however long, can crash a pair
            min(max_query_tokens, longest - pair.num_special - 1)
            if reads == "pairs"
            else _longest(query, max_query_tokens, positions),
            min(max_doc_tokens, positions - pair.num_special)
            if reads == "pairs"
            else _longest(doc, max_doc_tokens, positions),
        )

    def query_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens kept of each query, special tokens not counted."""
        return np.minimum(self.queries.lengths[rows], self.max_query_tokens).astype(np.int64)

    def doc_lengths(self, rows: np.ndarray, query_lengths: np.ndarray) -> np.ndarray:
        """Tokens kept of each doc beside a query of so many tokens, special tokens not counted."""
        lengths = np.minimum(self.docs.lengths[rows], self.max_doc_tokens).astype(np.int64)
        if self.reads == "pairs":
            lengths = np.minimum(lengths, self.max_pair_tokens - self.pair.num_special - query_lengths)
        return lengths

    def query_batch(self, rows: np.ndarray) -> TokenBatch:
        """Queries by themselves."""
        return self.query.lay_out([(self.queries, rows, self.query_lengths(rows))])

    def doc_batch(self, rows: np.ndarray) -> TokenBatch:
        """Docs by themselves."""
        return self.doc.lay_out([(self.docs, rows, self.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))])

    def group_sizes(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        """Tokens that each group costs, int64 [groups]; `doc_rows` [groups, docs], -1 where no doc is."""
        real = doc_rows >= 0
        query_lengths = self.query_lengths(query_rows)
        doc_lengths = self.doc_lengths(np.where(real, doc_rows, 0), query_lengths[:, None])
        if self.reads == "pairs":
            return ((doc_lengths + query_lengths[:, None] + self.pair.num_special) * real).sum(axis=1)
        return self.query.row_lengths(query_lengths) + (self.doc.row_lengths(doc_lengths) * real).sum(axis=1)

    def collate(
        self, query_rows: np.ndarray, doc_rows: np.ndarray, labels: np.ndarray, places: np.ndarray, share: float
    ) -> RankBatch:
        """Make the micro-batch of some groups; `doc_rows` and `labels` are [groups, docs], -1 where no doc is."""
        mask = doc_rows >= 0
        flat_docs = doc_rows[mask]
        group_of_doc, slot_of_doc = np.nonzero(mask)
        query_lengths = self.query_lengths(query_rows)
        doc_lengths = self.doc_lengths(flat_docs, query_lengths[group_of_doc])
        # a step's queries and docs are numbered group by group, so that a number is the same whatever the step is cut
        # into
        query_names = torch.from_numpy((places * (doc_rows.shape[1] + 1)).astype(np.int64))
        doc_names = query_names[group_of_doc] + 1 + torch.from_numpy(slot_of_doc)
        texts: dict[str, TokenBatch] = {}
        if self.reads == "pairs":
            sides = [
                (self.queries, query_rows[group_of_doc], query_lengths[group_of_doc]),
                (self.docs, flat_docs, doc_lengths),
            ]
            texts["pairs"] = replace(self.pair.lay_out(sides), row_ids=doc_names)
        else:
            texts["queries"] = replace(self.query_batch(query_rows), row_ids=query_names)
            texts["docs"] = replace(self.doc_batch(flat_docs), row_ids=doc_names)
        return RankBatch(
            labels=torch.from_numpy(np.where(mask, labels, 0.0).astype(np.float32)),
            doc_mask=torch.from_numpy(mask),
            places=torch.from_numpy(places.astype(np.int64)),
            share=share,
            **texts,
        )


def _longest(layout: Template, max_tokens: int, positions: int) -> int:
    """Stored tokens kept of a text in a row of its own: `max_tokens` of the text and its prefix, as far as they fit."""
    return min(max_tokens + layout.prefix_tokens, min(positions, layout.max_tokens or positions) - layout.num_special)
