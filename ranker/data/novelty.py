"""Labels that count a doc for what is new in it: one that repeats a better doc of its group counts 0."""

from __future__ import annotations

import numpy as np

from ranker.data.sampling import GroupSampler
from ranker.data.token_store import TokenStore


class NovelGroups:
    """Groups of another sampler, with label 0 for docs that repeat a doc of the group with a higher label.

    Docs are taken in the order of their labels, in the order of the group where these are equal. A doc repeats an
    earlier one with a label above 0 if their sets of tokens have at least `threshold` of their union in common
    (Jaccard); the first of equal docs counts. Duplicates that count nothing are the judgements of Bernstein and Zobel
    (2005, doi:10.1145/1099554.1099733).

    Args:
        sampler: Draws the groups.
        docs: Token store of the docs.
        threshold: Above 0, at most 1: docs with the same set of tokens.
        prompt_tokens: Tokens of a prompt at the start of each doc in the store.
    """

    def __init__(self, sampler: GroupSampler, docs: TokenStore, threshold: float, prompt_tokens: int = 0) -> None:
        self.sampler, self.docs, self.threshold, self.prompt_tokens = sampler, docs, threshold, prompt_tokens
        self.query_rows = sampler.query_rows

    def __len__(self) -> int:
        return len(self.sampler)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the docs of some groups, see `GroupSampler`."""
        rows, labels = self.sampler.draw(epoch, groups)
        return rows, np.stack([self._novel(*group) for group in zip(rows, labels, strict=True)])

    def fingerprint(self) -> str:
        """Return a string that changes whenever the groups or the threshold do."""
        return f"{self.sampler.fingerprint()} novelty {self.threshold!r}"

    def _novel(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the labels of a group [docs]."""
        novel, seen = labels.copy(), list[set[int]]()
        for place in np.argsort(-labels, kind="stable").tolist():
            if rows[place] < 0 or labels[place] <= 0:
                continue
            tokens = self._tokens(int(rows[place]))
            if any(len(tokens & other) >= self.threshold * len(tokens | other) for other in seen):
                novel[place] = 0
            else:
                seen.append(tokens)
        return novel

    def _tokens(self, row: int) -> set[int]:
        start, end = self.docs.offsets[row : row + 2].tolist()
        return set(self.docs.tokens[start + self.prompt_tokens : end].tolist())
