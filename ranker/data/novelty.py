"""Labels for novelty: a doc that repeats a doc of its group with a higher label gets label 0."""

from __future__ import annotations

import numpy as np

from ranker.data.sampling import GroupSampler
from ranker.data.token_store import TokenStore


class NovelGroups:
    """The groups of another sampler, with label 0 for docs that repeat a doc of the group with a higher label.

    Relevant docs are compared in descending order of their labels; docs with equal labels are in the order of the
    group. A doc repeats an earlier doc if the Jaccard similarity of their token sets is at least `threshold`. The
    earlier doc keeps its label. In the same way, Bernstein and Zobel (2005, doi:10.1145/1099554.1099733) judge
    duplicates as not relevant.

    Args:
        sampler: Draws the groups.
        docs: Token store of the docs.
        threshold: Smallest Jaccard similarity of a repetition, above 0 and at most 1 (equal token sets).
        prompt_tokens: Number of prompt tokens at the start of each doc in the store, which are not compared.
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
        """Return a string that changes whenever the groups or the threshold change."""
        return f"{self.sampler.fingerprint()} novelty {self.threshold!r}"

    def _novel(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the new labels of a group, [docs]."""
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
