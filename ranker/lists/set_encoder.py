"""Set-Encoder: a cross-encoder whose rows can attend to each other (Schlatt et al., 2024, arXiv:2404.06912)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ranker.encoders.causality import is_causal
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.row_groups import RowGroup, select_rows
from ranker.errors import ConfigError
from ranker.export._list_model import ELSEWHERE, read_options, write_options
from ranker.interactions.grid import to_grid
from ranker.interactions.list_windows import ListWindows, Part, score_lists
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

PATHS = ("bert", "modernbert", "packed")  # values of `Encoder.path` that support attention to other rows


class SetEncoder(MonoBERT):
    r"""Score each doc of a list in its own row. The row also attends to the first tokens of the list's other rows.

    The row of doc i is `[CLS] query [SEP] doc [SEP]`, with :math:`n_i` tokens. In every layer its tokens attend to the
    keys

    .. math:: K_i = [k_{i,1}, \dots, k_{i,n_i}; k_{j,1} \text{ for } j \ne i]

    and to the values of the same tokens. So the `[CLS]` token of each row passes information about its doc to the other
    rows. Scores do not depend on the order of the docs, because attention does not depend on the order of the other
    rows. With a list of one doc, the model computes the same as monoBERT.

    The paper's attention is that of `list_size=None`. In a list with more docs than the training's groups, it gives the
    other rows more weight than in training. `list_size` corrects this: the logits of :math:`k_{j,1}` get
    :math:`\log((L - 1) / (n - 1))` in a list of n docs, where L is `list_size`.

    Args:
        encoder: An encoder with bidirectional attention that runs without padding (its `path` is one of `PATHS`).
        head: As in `MonoBERT`.
        pooling: As in `MonoBERT`.
        pooler: As in `MonoBERT`.
        num_labels: As in `MonoBERT`.
        window: At inference: largest number of docs that are read together, see `ListWindows`; None: the whole list.
        stride: At inference: number of docs between the starts of two windows.
        merge: At inference: `mean` or `sliding`, see `ListWindows`.
        list_size: L, the number of docs of a training group; None: no correction.

    Raises:
        ConfigError: An option has an unknown value, or the encoder's attention can't read other rows.
    """

    reads_lists = True
    scoring_keys = ("lists",)
    needs_ragged = True
    takes_windows = False
    takes_prompt = False

    def __init__(
        self,
        encoder: Encoder,
        head: str = "auto",
        pooling: str = "auto",
        pooler: bool = False,
        num_labels: int = 1,
        window: int | None = None,
        stride: int | None = None,
        merge: str = "mean",
        list_size: int | None = None,
    ) -> None:
        super().__init__(encoder, head, pooling, pooler, num_labels)
        if list_size is not None and list_size < 1:
            raise ConfigError(f"model.list_size: expected at least 1 or null, got {list_size}")
        self.lists, self.list_size = ListWindows(window, stride, merge), list_size
        _check(encoder)

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        assert batch.pairs is not None
        docs = batch.doc_mask.shape[1]
        if self.training or self.lists.are_whole(docs):
            return self._whole(batch, batch.pairs, batch.doc_mask.sum(1))
        return self._by_windows(batch, batch.pairs)

    def _whole(self, batch: RankBatch, pairs: TokenBatch, lists: Tensor) -> Tensor:
        """Score lists with the given numbers of docs, each as a whole."""
        rows = replace(pairs, lists=lists, max_list=batch.doc_mask.shape[1], list_size=self.list_size)
        return super().forward(replace(batch, pairs=rows))

    def _by_windows(self, batch: RankBatch, pairs: TokenBatch) -> Tensor:
        """Score lists if some are longer than a window. The host waits for the scores of each window."""
        counts: list[int] = batch.doc_mask.sum(1).tolist()
        first_rows, lengths = np.cumsum([0, *counts]), pairs.cu_seqlens.diff().long()

        def score(parts: Sequence[Part]) -> list[np.ndarray]:
            rows = torch.from_numpy(np.concatenate([first_rows[number] + places for number, places in parts]))
            sizes = [len(places) for _, places in parts]
            rows = rows.to(lengths.device)
            chosen = lengths.index_select(0, rows)
            taken, _ = select_rows(pairs, RowGroup(rows, chosen, int(chosen.max()), False))
            mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
            part = replace(batch, doc_mask=mask.to(rows.device))
            values = self._whole(part, taken, torch.tensor(sizes, device=rows.device)).detach().cpu().double()
            return [row[:size].numpy() for row, size in zip(values, sizes, strict=True)]

        scores = torch.from_numpy(np.concatenate(score_lists(counts, self.lists, score)))
        double = self.encoder.model.dtype == torch.float64
        return to_grid(scores.to(lengths.device, torch.float64 if double else torch.float32), batch.doc_mask)

    def elsewhere(self) -> str:
        """Return a warning for users who load the stored model in other programs."""
        return ELSEWHERE

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write the folder of `MonoBERT.save`, and add the options of lists to it."""
        super().save(folder, max_tokens)
        write_options(folder, {**asdict(self.lists), "list_size": self.list_size})

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote, or the folder of a cross-encoder as the start of a Set-Encoder."""
        scorer = super().load(folder, execution)
        options = read_options(Path(folder))
        scorer.list_size = options.pop("list_size", None)
        scorer.lists = ListWindows(**options)
        return scorer


def _check(encoder: Encoder) -> None:
    """Check that the rows of an encoder can attend to each other.

    Raises:
        ConfigError: The rows can't attend to each other.
    """
    if encoder.path not in PATHS:
        ragged = "encoder.ragged=true and " if not encoder.execution.ragged else ""
        raise ConfigError(
            f"encoder: expected {ragged}an encoder family that runs without padding for model=set_encoder, such as "
            f"bert, modernbert or electra; got {encoder.config.model_type}, which runs as {encoder.path!r}"
        )
    if is_causal(encoder.model):
        raise ConfigError(
            "encoder: expected a model whose tokens attend in both directions for model=set_encoder, got the causal "
            f"{encoder.config.model_type}; set model=listwise_lm, which uses causal models"
        )
    row = torch.tensor([0, 1, 2], dtype=torch.int32, device=next(encoder.parameters()).device)
    tokens = torch.zeros(2, dtype=torch.int64, device=row.device)
    probe = TokenBatch(tokens, tokens, row, 1, lists=torch.tensor([2], device=row.device), max_list=2)
    training = encoder.training
    try:
        with torch.no_grad():
            encoder.eval()(probe)
    except NotImplementedError as error:
        raise ConfigError(
            f"encoder: expected a family with plain attention for model=set_encoder, got {encoder.config.model_type}: "
            f"{error}"
        ) from error
    finally:
        encoder.train(training)
