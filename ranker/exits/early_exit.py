"""monoBERT with additional heads at lower layers, which can score a pair before the last layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.native_head import READS, NativeHead
from ranker.encoders.passes import Begin
from ranker.encoders.row_groups import RowGroup, select_rows
from ranker.errors import CheckpointError, ConfigError
from ranker.interactions.pooling import pool
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

EXITS = ("exits.json", "exits.safetensors")  # files that are added to monoBERT's files


class EarlyExit(MonoBERT):
    """MonoBERT with additional linear heads at lower layers (early heads).

    In evaluation, the head of the layer `exit` scores all pairs. If `margin` is set instead, a pair exits at the first
    head whose score differs from `center` by at least `margin`. DeeBERT (Xin et al., 2020, arXiv:2004.12993) has the
    same rule with the entropy of the prediction in place of this difference. The score of a pair does not depend on
    other pairs.

    Args:
        encoder: The encoder.
        head: Kind of the last layer's head, see `MonoBERT`.
        pooling: Pooling before each head, see `MonoBERT`.
        pooler: Whether the last layer's head has a pooler, see `MonoBERT`; early heads have none.
        num_labels: Outputs of each head, 1 or 2 (the score is the log-odds).
        dropout: Dropout before each head.
        exits: Layer of the early head, from 1 to the last but one; or a list of layers, ascending; or `middle`.
        exit: Layer whose head scores in evaluation, one of `exits`; None: the last layer.
        margin: Smallest difference between a score and `center` at which a pair exits; None: no pair exits early.
        center: Score at which the probability of relevance is 1/2.

    Raises:
        ConfigError: There is no such layer, or both `exit` and `margin` are given.
    """

    program_keys = ("report", "trunk", "weight", "distilled")
    training_keys = ("trunk", "weight", "distilled", "exit", "margin", "center")
    scoring_keys = ("exits", "exit", "margin", "center")
    takes_windows = False

    def __init__(
        self,
        encoder: Encoder,
        head: str = "auto",
        pooling: str = "auto",
        pooler: bool = False,
        num_labels: int = 1,
        dropout: float = 0.0,
        exits: int | str | list[int] = "middle",
        exit: int | None = None,
        margin: float | None = None,
        center: float = 0.0,
    ) -> None:
        super().__init__(encoder, head, pooling, pooler, num_labels, dropout)
        if exits == "auto":
            raise ConfigError("model.exits: expected layers, got auto, which a probing report replaces before training")
        layers: Any = [max(1, encoder.num_layers // 2)] if exits == "middle" else exits
        self._add([layers] if isinstance(layers, int) else list(layers), num_labels)
        self.leave(exit, margin, center)

    def _add(self, layers: list[int], num_labels: int) -> None:
        """Add early heads with random weights at these layers."""
        last = self.encoder.num_layers
        if layers != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < max(last, 2):
            raise ConfigError(f"model.exits: expected ascending layers from 1, below the last, {last}; got {layers}")
        self.exits = tuple(layers)
        self.exit_heads = nn.ModuleList(nn.Linear(self.encoder.dim, num_labels) for _ in layers)
        linear: Any
        for linear in self.exit_heads:
            nn.init.normal_(linear.weight, std=getattr(self.encoder.config, "initializer_range", 0.02))
            nn.init.zeros_(linear.bias)

    def leave(self, exit: int | None = None, margin: float | None = None, center: float | None = None) -> None:
        """Set the rule by which pairs exit in evaluation, see `EarlyExit`.

        Args:
            exit: The layer at which all pairs exit; None: `margin` decides, or all pairs use the last layer.
            margin: The margin; None: no pair exits by its score.
            center: The center; None: the present one stays.

        Raises:
            ConfigError: There is no head at that layer, or both `exit` and `margin` are given.
        """
        if exit is not None and margin is not None:
            raise ConfigError(f"exit: expected a layer or a margin, not both, got exit={exit} and margin={margin}")
        if exit is not None and exit not in (*self.exits, self.encoder.num_layers):
            names = ", ".join(map(str, (*self.exits, self.encoder.num_layers)))
            raise ConfigError(f"exit: expected a layer with a head ({names}), got {exit}")
        if margin is not None and not margin >= 0:
            raise ConfigError(f"margin: expected at least 0, got {margin}")
        self.exit = None if exit == self.encoder.num_layers else exit
        self.margin = margin
        self.center: float = getattr(self, "center", 0.0) if center is None else center

    def elsewhere(self) -> str:
        """Return a warning for users who load the stored model in other programs; empty if scores are the same."""
        if self.exit is None and self.margin is None:
            return ""
        return "other programs ignore the early heads and score with the head of the last layer"

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs], 0 in cells without a doc. In evaluation, pairs may exit early."""
        if self.training or (self.exit is None and self.margin is None):
            return super().forward(batch)
        assert batch.pairs is not None
        logits = self._left(batch.pairs) if self.margin is not None else self._at(batch.pairs, self.exit or 0)
        return self.scores(logits, batch.doc_mask)

    def all_scores(self, batch: RankBatch, trunk: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Return the scores of the last layer's head, and those of each early head, all [batch, docs].

        Args:
            batch: The batch.
            trunk: Whether gradients of early scores reach the encoder.
        """
        assert batch.pairs is not None
        states = list(self.encoder.layers(batch.pairs))
        last = self.scores(self.read(states[-1], batch.pairs), batch.doc_mask)  # computed first: monoBERT's dropout
        read = [states[layer] if trunk else states[layer].detach() for layer in self.exits]
        early = [
            self.scores(self._early(number, part, batch.pairs), batch.doc_mask) for number, part in enumerate(read)
        ]
        return last, early

    def _early(self, number: int, states: Tensor, rows: TokenBatch) -> Tensor:
        """Return logits [rows, num_labels] of early head `number` (an index) from its layer's states [tokens, dim]."""
        return self._early_logits(number, pool(states, rows, self._early_pooling))

    @property
    def _early_pooling(self) -> str:
        reads = self.head.reads if isinstance(self.head, NativeHead) else ""
        return READS.get(reads, "cls" if reads else self.pooling)

    def _early_logits(self, number: int, pooled: Tensor) -> Tensor:
        """Return the logits [rows, num_labels] of an early head from pooled states [rows, dim]."""
        with torch.autocast(pooled.device.type, enabled=False):
            vectors = pooled if pooled.dtype == torch.float64 else pooled.float()
            logits: Tensor = self.exit_heads[number](self.dropout(vectors))
            return logits

    def _at(self, rows: TokenBatch, layer: int) -> Tensor:
        """Return the logits of the head of a layer. Higher layers are not computed if the encoder can stop early."""
        place = self.exits.index(layer)
        firsts = self.encoder.first_tokens_of(rows, layer) if self._early_pooling == "cls" else None
        if firsts is not None:
            return self._early_logits(place, firsts)
        for number, states in enumerate(self.encoder.layers(rows)):
            if number == layer:
                return self._early(place, states, rows)
        raise AssertionError("no such layer")

    def _left(self, rows: TokenBatch) -> Tensor:
        """Return the logits of each row's exit, the first head whose score reaches the margin, [rows, num_labels].

        If the encoder can resume from given states, higher layers are computed only for rows that have not exited.
        """
        assert self.margin is not None
        resumes = self.encoder.resumes
        head: Any = self.exit_heads[0]
        left = torch.zeros(rows.num_rows, head.out_features, device=rows.tokens.device)
        going = torch.arange(rows.num_rows, device=rows.tokens.device)
        part, states, number = rows, self.encoder.layers(rows), -1
        known: list[Tensor] = []
        for place, layer in enumerate((*self.exits, self.encoder.num_layers)):
            while number < layer:
                known, number = [next(states)], number + 1
            is_last = layer == self.encoder.num_layers
            logits = self.read(known[0], part) if is_last else self._early(place, known[0], part)
            scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            sure = (scores - self.center).abs() >= self.margin
            if is_last:
                return left.to(logits.dtype).index_copy(0, going, logits[_among(going, rows, part)])
            leaves = sure[_among(going, rows, part)]
            left = left.to(logits.dtype).index_copy(0, going[leaves], logits[_among(going, rows, part)][leaves])
            going = going[~leaves]
            if not len(going):
                return left
            if resumes and bool(leaves.any()):
                part, tokens = _rows(part, torch.nonzero(~sure)[:, 0])
                states = self.encoder.layers(part, Begin(layer, known[0].index_select(0, tokens)))
                number = layer - 1  # the new iterator first yields the states of this layer again
        raise AssertionError("unreachable")

    # the folder
    # ------------------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write monoBERT's folder with the last layer's head, and add the files of the early heads."""
        super().save(folder, max_tokens)
        rule: dict[str, Any] = {"exits": self.exits, "exit": self.exit, "margin": self.margin, "center": self.center}
        (folder / EXITS[0]).write_text(json.dumps(rule) + "\n", encoding="utf-8")
        save_file({key: value.contiguous() for key, value in self.exit_heads.state_dict().items()}, folder / EXITS[1])

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote.

        Raises:
            CheckpointError: The early heads are missing or broken.
        """
        scorer = super().load(folder, execution)
        try:
            rule = json.loads((Path(folder) / EXITS[0]).read_text(encoding="utf-8"))
            weights = load_file(Path(folder) / EXITS[1])
            scorer._add(list(rule["exits"]), len(weights["0.bias"]))
            scorer.exit_heads.load_state_dict(weights)
            scorer.leave(rule["exit"], rule["margin"], rule["center"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: expected the early heads of a model in {' and '.join(EXITS)}, got {error}"
            ) from error
        return scorer


def _among(going: Tensor, whole: TokenBatch, part: TokenBatch) -> Tensor:
    """Return each remaining row's index in `part`, int64 [going]; `part` is `whole` or has only the remaining rows."""
    return going if part is whole else torch.arange(len(going), device=going.device)


def _rows(batch: TokenBatch, rows: Tensor) -> tuple[TokenBatch, Tensor]:
    """Return a batch with only the given rows, and the indices of their tokens in `batch`, int64 [tokens]."""
    lengths = batch.cu_seqlens.diff().long()[rows]
    part, tokens = select_rows(batch, RowGroup(rows, lengths, int(lengths.max()), uniform=False))
    return replace(part, row_ids=None), tokens
