"""The layout of a token row: special tokens, prompts and filling around one or two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ranker.data.ragged import ranges, row_offsets
from ranker.data.token_store import TokenStore
from ranker.types import TokenBatch


class Part(NamedTuple):
    """The tokens that rows take from a text.

    Attributes:
        store: The text's token store.
        rows: Row of each text in the store [rows].
        lengths: Number of tokens to take from each text [rows], not counting `heads`; see `Template.kept`.
        starts: Position in the text where these tokens begin [rows]; None: at the first token.
        heads: Number of tokens from the start of the text that are put before these tokens [rows]; None: none.
    """

    store: TokenStore
    rows: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None = None
    heads: np.ndarray | None = None


@dataclass(frozen=True)
class Affixes:
    """Literal text of a prompt that is tokenized and stored together with a text, because their tokens may merge.

    Args:
        prefix: The literal before the text.
        prefix_tokens: Number of tokens of `prefix` at the start of each stored text.
        suffix: The literal after the text.
        suffix_tokens: Number of tokens of `suffix` alone. These tokens are also the first special tokens after the
            text, so that a truncated text is followed by the suffix. If the text is not truncated, the suffix that is
            stored with it overwrites them.
    """

    prefix: str = ""
    prefix_tokens: int = 0
    suffix: str = ""
    suffix_tokens: int = 0

    def around(self, text: str) -> str:
        """Return a text with its affixes, in the form that is tokenized and stored."""
        return self.prefix + text + self.suffix

    def stored_tokens(self, max_tokens: int) -> int:
        """Return how many tokens of a text to store.

        If there is a suffix, this is one token more than a row uses, so that a truncated text can be told from a whole
        one.
        """
        return max_tokens + self.prefix_tokens + (self.suffix_tokens + 1 if self.suffix else 0)


@dataclass(frozen=True)
class Template:
    """The tokenizer's special tokens around texts, such as `[CLS] a [SEP] b [SEP]` or `<s> a </s></s> b </s>`.

    Args:
        specials: Special token ids before the first text, after the first text and, in a pair, after the second text.
        segments: Segment (token type) id of each text.
        fill_to: Rows with fewer tokens are filled at their end up to this number (ColBERT's query expansion); 0: no
            filling.
        fill_token: Token id of the filling.
        attend_fill: Whether tokens attend to the filling.
        max_tokens: Longest row; None: the encoder's limit.
        prefix: Prompt that is tokenized and stored together with each text, for tokenizers that give other tokens if
            prompt and text are tokenized separately.
        prefix_tokens: Number of tokens of `prefix` at the start of each text in the store.
        special_segments: Segment id of each special token. Empty: a special token has the segment of the text before
            it; special tokens at the start have the segment of the first text.
        affixes: The affixes of the query and of the doc, for a pair with a prompt.
        doc_first: Whether the doc of a pair comes before the query.
    """

    specials: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    fill_to: int = 0
    fill_token: int = 0
    attend_fill: bool = True
    max_tokens: int | None = None
    prefix: str = ""
    prefix_tokens: int = 0
    special_segments: tuple[tuple[int, ...], ...] = ()
    affixes: tuple[Affixes, ...] = ()
    doc_first: bool = False

    @classmethod
    def of(cls, tokenizer: Any, texts: int) -> Template:
        """Derive the layout of 1 or 2 texts from the output of a fast tokenizer.

        If the tokenizer returns no token types by default, all segments are 0. If the tokenizer puts no special token
        around a text, an empty text becomes a row with one token, the end-of-text token.
        """
        encoded = tokenizer(*(["a", "b"][:texts]))
        token_ids = encoded["input_ids"]
        token_type_ids = encoded.get("token_type_ids") or [0] * len(token_ids)
        specials: list[list[int]] = [[]]
        special_segments: list[list[int]] = [[]]
        segments: list[int] = []
        for position, text in enumerate(encoded.sequence_ids()):
            if text is None:
                specials[-1].append(token_ids[position])
                special_segments[-1].append(token_type_ids[position])
            elif text == len(specials) - 1:
                specials.append([])
                special_segments.append([])
                segments.append(token_type_ids[position])
        usual = all(set(part) <= {segments[max(i - 1, 0)]} for i, part in enumerate(special_segments))
        kept = () if usual else tuple(map(tuple, special_segments))
        layout = cls(tuple(map(tuple, specials)), tuple(segments), special_segments=kept)
        if layout.num_special:
            return layout
        return replace(layout, fill_to=1, fill_token=tokenizer.eos_token_id or tokenizer.pad_token_id or 0)

    @property
    def num_special(self) -> int:
        """The number of special tokens in a row."""
        return sum(map(len, self.specials))

    def with_prompt(self, tokens: Sequence[int], prefix: str = "", prefix_tokens: int = 0) -> Template:
        """Return this layout with a prompt before the first text.

        Args:
            tokens: Token ids of a prompt that is tokenized alone.
            prefix: Text of a prompt that is tokenized together with the text.
            prefix_tokens: Number of tokens of `prefix`.
        """
        specials = ((*self.specials[0], *tokens), *self.specials[1:])
        special_segments = self.special_segments
        if special_segments:
            start = (*special_segments[0], *(self.segments[0] for _ in tokens))
            special_segments = (start, *special_segments[1:])
        return replace(
            self,
            specials=specials,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            special_segments=special_segments,
        )

    def affixes_of(self, text: int) -> Affixes:
        """Return the affixes of a text: `text` 0 is the query or the only text, 1 is the doc of a pair."""
        return self.affixes[text] if self.affixes else Affixes(self.prefix, self.prefix_tokens)

    def kept(self, text: int, stored: np.ndarray, longest: int) -> np.ndarray:
        """Return how many tokens of each text a row keeps, prefix included, suffix not included, int64 [rows].

        Args:
            text: See `affixes_of`.
            stored: Number of tokens of each text in the store [rows].
            longest: Largest number of tokens of a text.
        """
        return np.clip(stored.astype(np.int64) - self.affixes_of(text).suffix_tokens, 0, longest)

    @property
    def num_added(self) -> int:
        """The number of tokens in a row that come from special tokens and the prompt."""
        return self.num_special + self.prefix_tokens

    def row_lengths(self, text_lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row, special tokens and filling included, int64 [rows].

        Args:
            text_lengths: Number of stored tokens of each row's texts, a prefix included [rows].
        """
        return np.maximum(text_lengths + self.num_special, self.fill_to)

    def lay_out(self, texts: Sequence[Part | tuple[TokenStore, np.ndarray, np.ndarray]]) -> TokenBatch:
        """Copy stored tokens into a ragged batch.

        Args:
            texts: The tokens that rows take from each of their texts, the query first.
        """
        parts = [Part(*text) for text in texts]
        rows, order = len(parts[0].rows), range(len(parts))
        if self.doc_first:
            order, parts = order[::-1], parts[::-1]
        # The widths of the blocks of each row: special tokens, text, special tokens, ..., filling
        widths = [np.full(rows, len(self.specials[0]))]
        for part, after in zip(parts, self.specials[1:], strict=True):
            taken = part.lengths if part.heads is None else part.lengths + part.heads
            widths += [taken, np.full(rows, len(after))]
        unfilled_lengths = np.sum(widths, axis=0)
        block_widths = np.stack([*widths, np.maximum(self.fill_to - unfilled_lengths, 0)], axis=1)
        starts = np.cumsum(block_widths.ravel()).reshape(block_widths.shape) - block_widths
        total = int(block_widths.sum())
        # all positions get the filling first; texts and special tokens replace it below
        tokens, segments = np.full(total, self.fill_token, dtype=np.int64), np.zeros(total, dtype=np.int64)
        for i, special in enumerate(self.specials):
            for j, token in enumerate(special):
                tokens[starts[:, 2 * i] + j] = token
                segments[starts[:, 2 * i] + j] = (
                    self.special_segments[i][j] if self.special_segments else self.segments[max(i - 1, 0)]
                )
        for i, (store, store_rows, lengths, begins, heads) in enumerate(parts):
            target_starts, first = starts[:, 2 * i + 1], store.offsets[store_rows]
            if heads is not None:
                target = ranges(target_starts, heads)
                tokens[target], segments[target] = store.tokens[ranges(first, heads)], self.segments[i]
                target_starts = target_starts + heads
            if begins is not None:
                first = first + begins
            suffix = self.affixes_of(order[i]).suffix_tokens
            if suffix:  # the store has the suffix of a whole text; its tokens may differ from those of the suffix alone
                whole = store.offsets[store_rows + 1] - first == lengths + suffix
                lengths = lengths + suffix * whole
            target = ranges(target_starts, lengths)
            tokens[target], segments[target] = store.tokens[ranges(first, lengths)], self.segments[i]
        row_lengths = block_widths.sum(axis=1)
        masked_fill = self.fill_to > 0 and not self.attend_fill
        return TokenBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(segments),
            torch.from_numpy(row_offsets(row_lengths).astype(np.int32)),
            int(row_lengths.max()),
            attended=torch.from_numpy(unfilled_lengths.astype(np.int32)) if masked_fill else None,
            num_attended=int(unfilled_lengths.sum()) if masked_fill else 0,
        )
