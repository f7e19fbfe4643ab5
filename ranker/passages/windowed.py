"""Score docs by windows: an inner scorer reads each window, and an aggregation combines the windows of a doc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ranker.data.ragged import tensor_ranges
from ranker.data.template import Template
from ranker.data.windows import Windows
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.errors import CheckpointError
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors
from ranker.types import RankBatch, TokenBatch

WEIGHTS = "passages.safetensors"  # file in a model folder with the weights of a learned aggregation


class Aggregation(Protocol):
    """An `nn.Module` that computes a doc's score or vector from the scores or vectors of its windows.

    Attributes:
        reads: `scores`: it turns scores [..., windows] into [...]. `vectors`: it turns vectors [docs, windows, dim]
            into [docs, dim], and the constructor takes `dim`.
    """

    @property
    def reads(self) -> str: ...

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        """Aggregate values. `mask` is True for windows and False for padding, and may have fewer axes than scores."""
        ...


class Windowed(nn.Module):
    r"""Score a doc by its windows: :math:`s(q, d) = A(s(q, w_1), \dots, s(q, w_n))`, or A applied to window vectors.

    `Collator` cuts docs into windows, and a batch has one row for each window; all windows of a doc are in one batch.
    In a batch that was not cut into windows, each row is the only window of its doc. This class is for cross-encoders;
    for bi-encoders see `WindowedBiEncoder`.

    Args:
        scorer: The scorer of windows. If the aggregation reads vectors, it must have `row_vectors` and `vector_scores`.
        windows: How docs are cut.
        aggregation: Computes the scores or vectors of docs from those of their windows.
    """

    def __init__(self, scorer: Any, windows: Windows, aggregation: Any) -> None:
        super().__init__()
        self.scorer, self.windows, self.aggregation = scorer, windows, aggregation

    @staticmethod
    def of(scorer: Any, windows: Windows, aggregation: Any) -> Windowed:
        """Return a `Windowed` or a `WindowedBiEncoder`, depending on what `scorer` reads."""
        return (Windowed if scorer.reads == "pairs" else WindowedBiEncoder)(scorer, windows, aggregation)

    @property
    def reads(self) -> str:
        """What the scorer of windows reads, `pairs` or `texts`."""
        reads: str = self.scorer.reads
        return reads

    @property
    def encoder(self) -> Encoder:
        """The encoder of the scorer of windows."""
        encoder: Encoder = self.scorer.encoder
        return encoder

    @property
    def text_limits(self) -> tuple[int, int] | None:
        """None: a limit on docs in the scorer's folder is the limit of one window."""
        return None

    def pair_layout(self) -> Template:
        """Return the layout of a query and a window in one row."""
        own = getattr(self.scorer, "pair_layout", None)
        layout: Template = Template.of(self.encoder.tokenizer, 2) if own is None else own()
        return layout

    def settings(self) -> dict[str, Any]:
        """Return the options that change scores, apart from weights and tokenizer. Stored scores have their hash."""
        own = getattr(self.scorer, "settings", None)
        inner = {"pooling": getattr(self.scorer, "pooling", None)} if own is None else own()
        return {**inner, "windows": repr(self.windows), "aggregation": repr(self.aggregation)}

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        if self.aggregation.reads == "scores":
            return self._from_scores(batch)
        assert batch.pairs is not None
        vectors, mask = to_windows(self.scorer.row_vectors(batch.pairs), batch.pairs)
        docs = self._aggregated(vectors, mask)
        return to_grid(self.scorer.vector_scores(docs, batch.pairs, first_rows(batch.pairs)), batch.doc_mask)

    def _aggregated(self, values: Tensor, mask: Tensor) -> Tensor:
        """Aggregate values in the precision of the aggregation's weights."""
        weight = next(self.aggregation.parameters(), values)
        with torch.autocast(values.device.type, enabled=False):
            docs: Tensor = self.aggregation(values.to(weight.dtype), mask)
        return docs.to(values.dtype)

    def _from_scores(self, batch: RankBatch) -> Tensor:
        """Score windows as if they were docs, [batch, docs * windows], and aggregate them."""
        rows = batch.pairs if batch.pairs is not None else batch.docs
        assert rows is not None
        width = max(1, rows.max_windows)
        counts = batch.doc_mask.long() if rows.windows is None else to_grid(rows.windows, batch.doc_mask)
        mask = torch.arange(width, device=counts.device) < counts.unsqueeze(-1)
        scores = self.scorer(replace(batch, doc_mask=mask.flatten(1))).view(-1, width)
        cells = batch.doc_mask.flatten().nonzero_static(size=rows.num_texts)[:, 0]
        docs = self._aggregated(scores.index_select(0, cells), mask.view(-1, width).index_select(0, cells))
        return to_grid(docs, batch.doc_mask)

    def elsewhere(self) -> str:
        """Return a warning about the stored model's scores in other programs, whose formats have no windows."""
        said = (
            "other programs read one row per doc there, so they score about the first window of a doc "
            f"({self.windows.length} tokens), or the passage that they are given"
        )
        if self.aggregation.reads == "vectors":
            said += f", without the trained layers of {WEIGHTS}, and so not as trained"
        return f"{said}; ranker reads the windows of its ranker.yaml"

    def save(self, folder: Path, max_tokens: int, **limits: Any) -> None:
        """Write the scorer of windows with its own `save`, and add the weights of a learned aggregation to its folder.

        Args:
            folder: An empty folder.
            max_tokens: Longest row, special tokens included.
            limits: Further limits of a bi-encoder, see `BiEncoder.save`.
        """
        self.scorer.save(folder, max_tokens, **limits)
        self.save_aggregation(folder)

    def save_aggregation(self, folder: Path) -> None:
        """Write the weights of a learned aggregation; write no file if the aggregation has none."""
        state = self.aggregation.state_dict()
        if state:
            save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, folder / WEIGHTS)

    def load_aggregation(self, folder: Path) -> None:
        """Load the weights that `save_aggregation` wrote.

        Raises:
            CheckpointError: The folder lacks a weight, or has a weight that the aggregation lacks.
        """
        expected = self.aggregation.state_dict()
        stored = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else {}
        shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (expected, stored)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{folder / WEIGHTS}: expected {shapes[0] or 'no such file'}, got {shapes[1] or 'none'}; set passages "
                "to the value of the training"
            )
        self.aggregation.load_state_dict(stored)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Raise an error, because the class of the inner scorer is not known here; use `ranker.checkpoint.load_scorer`.

        Raises:
            CheckpointError: Always raised.
        """
        raise CheckpointError(f"{folder}: expected load_scorer for a model that reads windows, got {execution!r:.60}")


class WindowedBiEncoder(Windowed):
    """A bi-encoder that reads windows: a doc has one vector per window, or one vector aggregated from these."""

    @property
    def vectors(self) -> str:
        """`one` if a doc has one vector, `windows` if it has one for each window."""
        return "one" if self.aggregation.reads == "vectors" or self.windows.most == 1 else "windows"

    @property
    def similarity(self) -> str:
        """Similarity of two vectors."""
        similarity: str = self.scorer.similarity
        return similarity

    @property
    def dim(self) -> int:
        """Size of a vector."""
        dim: int = self.scorer.dim
        return dim

    @property
    def doc_encoder(self) -> Encoder | None:
        """Encoder of docs; None: docs are read by `encoder`."""
        encoder: Encoder | None = self.scorer.doc_encoder
        return encoder

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a window."""
        layouts: tuple[Template, Template] = self.scorer.layouts()
        return layouts

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return one vector per query."""
        vectors: TextVectors = self.scorer.encode_queries(batch)
        return vectors

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return the vectors of docs: one for each doc, or one for each window."""
        values = self.scorer.encode_docs(batch).values
        if self.vectors == "windows":
            return TextVectors(values, self.doc_vector_counts(batch))
        if self.aggregation.reads == "scores":
            return TextVectors(values)
        vectors, mask = to_windows(values, batch)
        docs = self._aggregated(vectors, mask)
        return TextVectors(functional.normalize(docs, dim=1) if self.similarity == "cosine" else docs)

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return the number of vectors of each doc, int64 [docs], without encoding the docs."""
        if self.vectors == "one" or batch.windows is None:
            return torch.ones(batch.num_texts, dtype=torch.int64, device=batch.tokens.device)
        return batch.windows

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Return the scores of every query with every doc, [queries, docs], from their vectors."""
        scores: Tensor
        if docs.counts is None:
            scores = self.scorer.score_block(queries, docs)
            return scores
        grid, mask = docs.padded()
        scores = self.scorer.score_block(queries, TextVectors(grid.flatten(0, 1)))
        return self._aggregated(scores.view(len(scores), *mask.shape), mask)

    def scoring_parameters(self) -> list[nn.Parameter]:
        """The trained parameters on which `score_block` depends; an aggregation of scores has none."""
        parameters: list[nn.Parameter] = self.scorer.scoring_parameters()
        return parameters

    def divisor(self) -> Tensor | float:
        """The number by which `score_block` divides inner products."""
        divisor: Tensor | float = self.scorer.divisor()
        return divisor

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with the docs of its group; 0 in cells without a doc."""
        if self.vectors == "windows":
            return self._from_scores(batch)
        assert batch.queries is not None and batch.docs is not None
        scores: Tensor = self.scorer.score_grid(
            self.encode_queries(batch.queries), self.encode_docs(batch.docs), batch.doc_mask
        )
        return scores


def scorer_of_windows(scorer: Any) -> Any:
    """Return the scorer of a window, if `scorer` reads windows; otherwise the scorer itself."""
    return scorer.scorer if isinstance(scorer, Windowed) else scorer


def to_windows(values: Tensor, rows: TokenBatch) -> tuple[Tensor, Tensor]:
    """Arrange the values of rows by docs, padded to the largest number of windows.

    Args:
        values: [rows, ...].
        rows: The rows, which are windows of docs; without windows, each row is the only window of a doc.

    Returns:
        The values [docs, windows, ...], 0 in padding, and a mask, True for windows, bool [docs, windows].
    """
    if rows.windows is None:
        return values.unsqueeze(1), torch.ones(len(values), 1, dtype=torch.bool, device=values.device)
    mask = torch.arange(rows.max_windows, device=values.device) < rows.windows.unsqueeze(1)
    docs = torch.arange(rows.num_texts, device=values.device)
    docs = docs.repeat_interleave(rows.windows, output_size=rows.num_rows)
    cells = docs * rows.max_windows + tensor_ranges(0, rows.windows, rows.num_rows)
    grid = values.new_zeros(mask.numel(), *values.shape[1:]).index_copy(0, cells, values)
    return grid.view(*mask.shape, *values.shape[1:]), mask


def first_rows(rows: TokenBatch) -> Tensor:
    """Return the first row of each doc, int64 [docs]."""
    if rows.windows is None:
        return torch.arange(rows.num_rows, device=rows.tokens.device)
    return rows.windows.cumsum(0) - rows.windows
