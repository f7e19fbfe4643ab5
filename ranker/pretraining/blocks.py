"""Training rows of `mlm` and `electra`: each row is a block of a doc with some tokens masked."""

from __future__ import annotations

import numpy as np

from ranker.data.template import Template
from ranker.pretraining.masking import Masked, MaskedBatch, Masking, hidden_of, mask, masked_batch
from ranker.pretraining.texts import Texts, lay_out


class MaskedBlocks:
    """Draws the rows of a step: blocks of docs with masked tokens.

    Args:
        texts: The docs.
        masking: How tokens are masked.
    """

    def __init__(self, texts: Texts, masking: Masking) -> None:
        self.texts, self.masking = texts, masking
        self.blocks, self.layout = texts.blocks(), Template.of(texts.tokenizer, 1)

    def __len__(self) -> int:
        return len(self.blocks.docs)

    def largest(self) -> int:
        """Return the number of tokens of the longest row."""
        return int(self.blocks.lengths.max()) + self.layout.num_special

    def step(self, epoch: int, groups: np.ndarray) -> MaskedRows:
        """Return the rows of a step."""
        return MaskedRows(mask(self.blocks.take(groups), groups, epoch, self.masking, self.texts), self.layout)

    def fingerprint(self) -> str:
        """Return a hash of everything that the draws depend on, except the seed."""
        return self.texts.fingerprint("masked", self.masking)


class MaskedRows:
    """The rows of a step, one per group; here a group is one block.

    Args:
        masked: The rows with masked tokens.
        layout: The special tokens around a text.
    """

    contrast = None

    def __init__(self, masked: Masked, layout: Template) -> None:
        self.masked, self.layout = masked, layout
        self.sizes = layout.row_lengths(masked.rows.lengths)

    def batch(self, chosen: np.ndarray) -> MaskedBatch:
        """Return the micro-batch of some groups."""
        rows = lay_out(self.layout, [self.masked.rows], chosen, chosen)
        starts = rows.cu_seqlens[:-1].numpy().astype(np.int64) + len(self.layout.specials[0])
        return masked_batch(rows, chosen, hidden_of(self.masked, chosen, starts), int(self.sizes.sum()))
