"""The form of the token batches that a scorer reads, and the limits of their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ranker.data.instructions import Instructed
from ranker.data.list_rows import ListRows
from ranker.data.template import Affixes, Template
from ranker.data.windows import Windows


@dataclass(frozen=True)
class ScorerInputs:
    """The form of the token batches that a scorer reads.

    Args:
        tokenizer: The encoder's fast tokenizer.
        reads: `pairs` (query and doc in one sequence), `texts` (each query and each doc in its own sequence) or `lists`
            (like `texts`, but the scorer joins the texts to rows with several docs).
        max_positions: Longest sequence that the encoder accepts, in tokens.
        layouts: Layouts of a single query and of a single doc in a sequence; None: the tokenizer's layout of one text.
        pair: Layout of a query and a doc in one sequence; None: the tokenizer's layout of two texts.
        by_query: Whether the candidates of a query must be adjacent in the batches, because their rows share a prefix
            that is computed once.
        windows: How docs are cut into windows; None: a doc is one row.
        instructed: How the instruction of a query is put before the query; None: queries have no instructions.
        whole_lists: Whether the score of a doc depends on the query's other docs, so that all docs of a query must be
            in one batch.
        list_rows: Describes the rows that the scorer builds from a list, if the scorer reads `lists`.
    """

    tokenizer: Any
    reads: str
    max_positions: int
    layouts: tuple[Template, Template] | None = None
    pair: Template | None = None
    by_query: bool = False
    windows: Windows | None = None
    instructed: Instructed | None = None
    whole_lists: bool = False
    list_rows: ListRows | None = None

    def affixes(self, text: int) -> Affixes:
        """Return the part of the prompt that the store keeps with each query (`text` 0) or each doc (`text` 1)."""
        if self.reads == "pairs":
            return self.pair.affixes_of(text) if self.pair is not None else Affixes()
        return self.layouts[text].affixes_of(0) if self.layouts is not None else Affixes()

    @classmethod
    def of(cls, scorer: Any) -> ScorerInputs:
        """Take the values from a scorer and its encoder.

        Args:
            scorer: A `Scorer` of `ranker.models.interface`, which `ranker.data` may not import.
        """
        layouts = scorer.layouts() if scorer.reads != "pairs" else None
        pair = pair_layout(scorer) if scorer.reads == "pairs" else None
        encoder = scorer.encoder
        return cls(
            encoder.tokenizer,
            scorer.reads,
            encoder.max_tokens,
            layouts,
            pair,
            by_query=encoder.execution.share_prefix,
            windows=getattr(scorer, "windows", None),
            whole_lists=getattr(scorer, "reads_lists", False),
            list_rows=getattr(scorer, "list_rows", None),
        )


def pair_layout(scorer: Any) -> Template:
    """Return the layout of a query and a doc in one sequence: the scorer's own layout, or else its tokenizer's."""
    own = getattr(scorer, "pair_layout", None)
    layout: Template = Template.of(scorer.encoder.tokenizer, 2) if own is None else own()
    return layout


@dataclass(frozen=True)
class TextLimits:
    """Largest number of tokens per text.

    Args:
        query: Limit of a query, without special tokens.
        doc: Limit of a doc, without special tokens.
        pair: Limit of a query-doc pair, special tokens included; None: the encoder's limit.
    """

    query: int = 64
    doc: int = 256
    pair: int | None = None
