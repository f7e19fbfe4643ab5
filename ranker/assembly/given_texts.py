"""Queries and docs that a caller in Python gives as texts: tokenized in memory, and collated for a scorer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from ranker.data.collate import Collator
from ranker.data.memory_store import MemoryStore
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.text_encoder import Encoded, TextEncoder
from ranker.models.interface import Scorer

Encode = Callable[[list[str]], Encoded]


class GivenTexts:
    """Tokenizes and collates texts for a scorer.

    Args:
        scorer: The scorer.
        limits: Largest number of tokens per text.

    Attributes:
        inputs: The form of the token batches that the scorer reads.
    """

    def __init__(self, scorer: Scorer, limits: TextLimits) -> None:
        self.inputs = ScorerInputs.of(scorer)
        self._encoders: Sequence[Encode] = [
            TextEncoder(scorer.encoder.tokenizer, self.inputs.affixes(text).stored_tokens(longest))
            for text, longest in enumerate((limits.query, limits.doc))
        ]
        self._collator = Collator.of(self.inputs, self._store(0, {}), self._store(1, {}), limits)

    def tokenized_by(self, replaced: Callable[[Sequence[Any]], Sequence[Encode]]) -> Self:
        """Return a copy with replaced tokenizers, such as tokenizers that run in other processes.

        Args:
            replaced: Function that takes the query's and the doc's `TextEncoder` and returns their replacements.
        """
        other = copy.copy(self)
        other._encoders = replaced(self._encoders)
        return other

    def collator(
        self, queries: Mapping[str, str], docs: Mapping[str, str], titles: Mapping[str, str] = MappingProxyType({})
    ) -> Collator:
        """Return a collator that tokenizes these texts. Several threads may call this at the same time.

        Args:
            queries: Id -> text of each query.
            docs: Id -> text of each doc.
            titles: Text of a doc -> the title that it begins with; used by models that repeat titles in windows.
        """
        title_lengths = self._title_lengths([titles.get(text, "") for text in docs.values()])
        return replace(
            self._collator, queries=self._store(0, queries), docs=self._store(1, docs), title_lengths=title_lengths
        )

    def _title_lengths(self, titles: list[str]) -> np.ndarray | None:
        """Return the number of tokens of each title; None if windows do not repeat titles."""
        windows = self.inputs.windows
        if windows is None or not windows.title:
            return None
        return TextEncoder(self.inputs.tokenizer, windows.title)(titles)[0]

    def _store(self, side: int, texts: Mapping[str, str]) -> MemoryStore:
        """Tokenize the values of `texts`, which maps ids to texts; `side` is 0 for queries and 1 for docs."""
        around = self.inputs.affixes(side).around
        return MemoryStore(self._encoders[side], {text_id: around(text) for text_id, text in texts.items()})
