"""Pairwise re-ranking: a model compares two docs at a time.

Sources: Nogueira et al., 2019 (arXiv:1910.14424, duoBERT); Pradeep et al., 2021 (arXiv:2101.05667, duoT5).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ranker.data.list_rows import DocPairRows, ListTexts, Pieces
from ranker.data.template import Template
from ranker.encoders.decoder_step import ENCODERS
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.errors import CheckpointError, ConfigError
from ranker.export._list_model import ELSEWHERE, read_options, write_options
from ranker.interactions.duels import AGGREGATIONS
from ranker.interactions.grid import to_grid
from ranker.models.mono_t5 import MonoT5
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch

TEXT = Template(specials=((), ()), segments=(0,))  # texts without special tokens
T5_LITERALS = ("Query:", "Document0:", "Document1:", "Relevant:")


class Duo(nn.Module):
    r"""Compare each ordered pair of a list's docs, and compute a doc's score from all comparisons of the doc.

    A row is `[CLS] query [SEP] doc i [SEP] doc j [SEP]`, or for a T5 `Query: q Document0: doc i Document1: doc j
    Relevant:`. The probability that doc i is better than doc j is :math:`p_{ij} = \sigma(f(q, d_i, d_j))`, where f is
    the logit of the row.

    Args:
        encoder: The encoder of a BERT, or of a T5.
        head: As in `MonoBERT`. Ignored for a T5, which scores with its decoder's logits of two words.
        pooling: As in `MonoBERT`. Ignored for a T5.
        top: Number of docs at the start of a list that are compared. The other docs rank after them in their old order.
        aggregation: `sum`: :math:`\sum_j p_{ij}`; `bradley_terry`: the strengths of a Bradley-Terry model fitted to
            the :math:`p_{ij}`, see `ranker.interactions.duels`.

    Raises:
        ConfigError: An option has an unknown value.
    """

    reads = "lists"
    reads_lists = True
    scoring_keys = ("top", "aggregation")
    text_limits: tuple[int, int] | None = None

    def __init__(
        self, encoder: Encoder, head: str = "auto", pooling: str = "auto", top: int = 10, aggregation: str = "sum"
    ) -> None:
        super().__init__()
        if top < 2:
            raise ConfigError(f"model.top: expected at least 2 docs to compare, got {top}")
        if aggregation not in AGGREGATIONS:
            raise ConfigError(f"model.aggregation: expected one of {', '.join(AGGREGATIONS)}; got {aggregation!r}")
        self.top, self.aggregation = top, aggregation
        self.is_t5 = type(encoder.model).__name__ in ENCODERS
        self.scorer: Any = MonoT5(encoder) if self.is_t5 else MonoBERT(encoder, head, pooling)
        self.literals, self.segments = _layout(encoder, self.is_t5)

    @property
    def encoder(self) -> Encoder:
        """The encoder."""
        encoder: Encoder = self.scorer.encoder
        return encoder

    @property
    def list_rows(self) -> DocPairRows:
        """Describe the lengths of the rows of a list."""
        return DocPairRows(sum(map(len, self.literals)), self.top)

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc, both without special tokens."""
        return TEXT, TEXT

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        texts = ListTexts.of(batch, list(self.literals))
        logits = self._logits(batch, texts)
        width = logits.shape[1]
        counts = torch.from_numpy(texts.counts).to(logits.device)
        compared = torch.arange(width, device=logits.device) < counts.unsqueeze(1)
        with torch.autocast(logits.device.type, enabled=False):
            top = AGGREGATIONS[self.aggregation](logits, compared).to(logits.dtype)
        longest = int(texts.counts.max())
        if longest > width:  # docs beyond the top rank after the top docs, in their old order
            lowest = top.masked_fill(~compared, torch.inf).min(1, keepdim=True).values
            behind = lowest - 1 - torch.arange(longest - width, device=top.device)
            top = torch.cat([top, behind], 1)
        is_doc = torch.arange(top.shape[1], device=top.device) < counts.unsqueeze(1)
        return to_grid(top[is_doc], batch.doc_mask)

    def _logits(self, batch: RankBatch, texts: ListTexts) -> Tensor:
        """Return the logits of all ordered pairs of the top docs, [lists, top, top]; 0 in cells without a pair."""
        width = min(self.top, int(texts.counts.max()))
        docs, places = np.minimum(texts.counts, self.top), np.arange(width)
        is_doc = places < docs[:, None]
        lists, first, second = np.nonzero(is_doc[:, :, None] & is_doc[:, None, :] & ~np.eye(width, dtype=bool))
        device, dtype = texts.tokens.device, next(self.scorer.head.parameters()).dtype
        grid = torch.zeros(len(docs) * width * width, dtype=dtype, device=device)
        if not len(lists):  # each list has a single doc
            return grid.view(len(docs), width, width) + 0.0 * sum(weight.sum() for weight in self.parameters())
        row_ids = None
        if batch.queries is not None and batch.queries.row_ids is not None:
            step = batch.doc_mask.shape[1] ** 2
            row_ids = batch.queries.row_ids.cpu().numpy()[lists] * step + first * batch.doc_mask.shape[1] + second
        rows = self._pieces(texts, lists, first, second).joined(texts.tokens, row_ids)
        ones = torch.ones(len(lists), 1, dtype=torch.bool, device=device)
        scores = self.scorer(replace(batch, doc_mask=ones, pairs=rows, queries=None, docs=None)).flatten()
        cells = torch.from_numpy((lists * width + first) * width + second).to(device)
        return grid.to(scores.dtype).index_copy(0, cells, scores).view(len(docs), width, width)

    def _pieces(self, texts: ListTexts, lists: np.ndarray, first: np.ndarray, second: np.ndarray) -> Pieces:
        """Return the rows of pairs. A row that is too long is cut; a doc keeps at least half of the room for docs."""
        numbers = [texts.first_docs()[lists] + place for place in (first, second)]
        lengths = [texts.doc_lengths[doc] for doc in numbers]
        queries = texts.query_lengths[lists]
        room = np.maximum(self.encoder.max_tokens - self.list_rows.per_row - queries, 2)
        cut = [np.minimum(mine, np.maximum(room // 2, room - other)) for mine, other in (lengths, lengths[::-1])]
        starts = [texts.query_starts[lists], *(texts.doc_starts[doc] for doc in numbers)]
        literals = zip(texts.literal_starts, texts.literal_lengths, strict=True)
        columns = [(np.full_like(lists, start), np.full_like(lists, length)) for start, length in literals]
        order = [columns[0], (starts[0], queries), columns[1], (starts[1], cut[0]), columns[2], (starts[2], cut[1])]
        pieces = np.array([*order, columns[3]])  # [pieces, starts and lengths, rows]
        return Pieces(
            pieces[:, 0].T.ravel(), pieces[:, 1].T.ravel(), np.tile(self.segments, len(lists)),
            np.full(len(lists), len(pieces)),
        )  # fmt: skip

    def elsewhere(self) -> str:
        """Return a warning for users who load the stored model in other programs."""
        return ELSEWHERE

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write the scorer of rows with its own `save`, and add the options to its folder."""
        self.scorer.save(folder, max_tokens)
        options = {"scorer": type(self.scorer).__name__, "top": self.top, "aggregation": self.aggregation}
        write_options(folder, options)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote.

        Raises:
            CheckpointError: The folder was not written by `save`.
        """
        options = read_options(Path(folder))
        kinds: dict[str, Any] = {"MonoBERT": MonoBERT, "MonoT5": MonoT5}
        kind = kinds.get(str(options.pop("scorer", None)))
        if kind is None:
            raise CheckpointError(f"{folder}: expected a folder that model=duo wrote, got one without its options")
        scorer = kind.load(Path(folder), execution)
        duo = cls(scorer.encoder, "own", "mean", **options)
        duo.scorer = scorer
        return duo


def _layout(encoder: Encoder, is_t5: bool) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
    """Return the token ids of the 4 literals around a row's 3 texts, and the segment ids of the row's 7 pieces."""
    tokenizer = encoder.tokenizer
    if is_t5:
        ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in T5_LITERALS]
        return (*ids[:3], (*ids[3], *Template.of(tokenizer, 1).specials[-1])), np.zeros(7, dtype=np.int64)
    layout = Template.of(tokenizer, 2)
    start, middle, end = layout.specials
    first, second = layout.segments
    return (start, middle, middle, end), np.array([first, first, first, second, second, second, second])
