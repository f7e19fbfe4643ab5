"""Multitask cross-encoder: monoBERT with heads for probing tasks, which read chosen layers.

The source is Wallat, Beringer, Anand and Anand, "Probing BERT for Ranking Abilities" (ECIR 2023, DOI
10.1007/978-3-031-28238-6_17).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.errors import CheckpointError, ConfigError
from ranker.models.monobert import MonoBERT
from ranker.multitask.heads import read_heads, task_class_of
from ranker.multitask.options import Head
from ranker.multitask.rows import MAX_SPANS, AuxiliaryTask, num_classes
from ranker.multitask.steps import HeadBatch, TaskBatch
from ranker.probing.examples import ProbeTask
from ranker.types import RankBatch

HEADS = ("heads.json", "heads.safetensors")  # files beside those of monoBERT


class TaskHead(nn.Module):
    """A head: pooled states -> dropout -> linear -> ReLU -> dropout -> linear.

    Args:
        spec: Configuration of the head.
        layers: The layers that the head reads. Several layers are mixed with learned softmax weights, which start equal
            (Peters et al., 2018, arXiv:1802.05365).
        pooling: `cls`, `mean` or `span`.
        dim: Size of a state.
        num_outputs: Number of classes; 1 for regression.
        hidden: Size of the hidden layer.
        dropout: Rate of both dropouts.
    """

    def __init__(
        self, spec: Head, layers: Sequence[int], pooling: str, dim: int, num_outputs: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.spec, self.layers, self.pooling, self.num_outputs = spec, tuple(layers), pooling, num_outputs
        self.num_spans = MAX_SPANS if pooling == "span" else 1
        self.mix = nn.Parameter(torch.zeros(len(layers))) if len(layers) > 1 else None
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.Linear(self.num_spans * dim, hidden)
        self.out = nn.Linear(hidden, num_outputs)

    @property
    def regression(self) -> bool:
        """Whether the head predicts a number, not a class."""
        return self.spec.regression

    @property
    def deepest(self) -> int:
        """The deepest layer that the head reads."""
        return max(self.layers)

    def forward(self, states: Sequence[Tensor], batch: HeadBatch) -> Tensor:
        """Return the outputs of each target [targets, outputs], float32, or float64 for float64 states.

        Args:
            states: Hidden states of each of `layers` [tokens, dim].
            batch: The targets.
        """
        read = [layer_states.index_select(0, batch.tokens) for layer_states in states]
        mixed = read[0]
        if self.mix is not None:
            mixed = torch.einsum("l,ltd->td", self.mix.softmax(0).to(mixed.dtype), torch.stack(read))
        sums = mixed.new_zeros(len(batch.lengths), mixed.shape[1]).index_add(0, batch.owners, mixed)
        pooled = (sums / batch.lengths.unsqueeze(1).to(sums.dtype)).view(-1, self.num_spans * mixed.shape[1])
        outputs = self.out(self.dropout(functional.relu(self.inner(self.dropout(pooled)))))
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    def loss(self, outputs: Tensor, batch: HeadBatch) -> Tensor:
        """Return this micro-batch's part of the mean loss over the step's targets.

        The loss of a target is its cross-entropy in nats, or its squared error.

        Args:
            outputs: Outputs of the head [targets, outputs].
            batch: The targets and their labels.
        """
        if self.regression:
            errors = (outputs.squeeze(1) - batch.labels.to(outputs.dtype)).square().sum()
        else:
            errors = functional.cross_entropy(outputs, batch.labels, reduction="sum")
        return errors / batch.num_targets


class Multitask(MonoBERT):
    """MonoBERT with heads for auxiliary tasks. Only training uses these heads; scores are those of monoBERT.

    Args:
        encoder: The encoder.
        head: The ranking head, see `MonoBERT`.
        pooling: Input of the ranking head, see `MonoBERT`.
        pooler: Whether BERT's dense layer (with random initial weights) and tanh are between pooling and ranking head.
        num_labels: Number of outputs of the ranking head: 1, or 2, for which the score is the log-odds.
        dropout: Dropout before the ranking head.
        heads: The auxiliary heads: mappings with the keys of `ranker.multitask.options.Head`.
        head_hidden: Size of an auxiliary head's hidden layer.
        head_dropout: Rate of both dropouts of an auxiliary head.

    Raises:
        ConfigError: A head is invalid, or the encoder lacks a layer.
    """

    program_keys = ("auto", "labels", "sampling", "weighting")
    takes_prompt = False  # the rows of auxiliary tasks have no prompt
    takes_windows = False  # the rows of auxiliary tasks have no windows
    training_keys = ("labels", "sampling", "weighting")

    def __init__(
        self,
        encoder: Encoder,
        head: str = "auto",
        pooling: str = "auto",
        pooler: bool = False,
        num_labels: int = 1,
        dropout: float = 0.0,
        heads: list | None = None,
        head_hidden: int = 128,
        head_dropout: float = 0.0,
    ) -> None:
        super().__init__(encoder, head, pooling, pooler, num_labels, dropout)
        self.heads = nn.ModuleDict()
        for task_head in read_heads(heads or []):
            if task_head.layer == "auto":
                raise ConfigError(
                    f"model.heads.{task_head.label}.layer: expected a layer, got auto, which is replaced by a "
                    "probing report before training"
                )
            task = make_task(task_head)
            pooled = task_head.pooling or ("mean" if task.whole_text else "span")
            outputs = 1 if task_head.regression else num_classes(task_head, task)
            layers = task_head.resolved_layers(encoder.num_layers)
            self.heads[task_head.label] = TaskHead(
                task_head, layers, pooled, encoder.dim, outputs, head_hidden, head_dropout
            )

    def task_heads(self) -> list[TaskHead]:
        """Return the heads in order."""
        return list(self.heads.values())  # type: ignore[arg-type]

    def auxiliary_tasks(self) -> list[AuxiliaryTask]:
        """Return the probing task of each head, with the head's options and pooling."""
        return [AuxiliaryTask(head.spec, make_task(head.spec), head.pooling) for head in self.task_heads()]

    def forward(self, batch: RankBatch) -> Tensor:
        """Return the ranking scores [batch, docs]; the batch may have auxiliary rows, which are not scored."""
        if isinstance(batch, TaskBatch) and batch.num_rank_rows:
            scores = self.outputs(batch)[0]
            assert scores is not None
            return scores
        return super().forward(batch)

    def outputs(self, batch: TaskBatch) -> tuple[Tensor | None, list[Tensor]]:
        """Run the encoder once, up to the deepest layer that a head of the batch reads.

        Returns:
            Ranking scores [batch, docs], or None without ranking rows; and the outputs [targets, outputs] of each head
            in `batch.heads`.
        """
        assert batch.pairs is not None
        heads = [(self.task_heads()[head_batch.task], head_batch) for head_batch in batch.heads]
        last = self.encoder.num_layers
        needed = {layer for head, _ in heads for layer in head.layers} | ({last} if batch.num_rank_rows else set())
        states: dict[int, Tensor] = {}
        for layer, layer_states in enumerate(self.encoder.layers(batch.pairs)):
            if layer in needed:
                states[layer] = layer_states
            if layer == max(needed):
                break
        scores = None
        if batch.num_rank_rows:
            logits = self.read(states[last][: batch.num_rank_tokens], batch.rank_pairs)
            scores = self.scores(logits, batch.doc_mask)
        return scores, [head([states[layer] for layer in head.layers], head_batch) for head, head_batch in heads]

    # the folder
    # ------------------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write monoBERT's folder, which other programs can load, and the heads (`heads.json`, `heads.safetensors`)."""
        super().save(folder, max_tokens)
        described = {
            name: {
                "asked": head.spec.record(),
                "layers": list(head.layers),
                "pooling": head.pooling,
                "outputs": head.num_outputs,
                "hidden": head.inner.out_features,
                "dropout": head.dropout.p,
            }
            for name, head in zip(self.heads, self.task_heads(), strict=True)
        }
        (folder / HEADS[0]).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        save_file({key: value.contiguous() for key, value in self.heads.state_dict().items()}, folder / HEADS[1])

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote.

        Raises:
            CheckpointError: The heads are missing or broken.
        """
        scorer = super().load(folder, execution)
        try:
            described = json.loads((Path(folder) / HEADS[0]).read_text(encoding="utf-8"))
            for name, stored in described.items():
                scorer.heads[name] = TaskHead(
                    Head(**stored["asked"]),
                    stored["layers"],
                    stored["pooling"],
                    scorer.encoder.dim,
                    stored["outputs"],
                    stored["hidden"],
                    stored["dropout"],
                )
            scorer.heads.load_state_dict(load_file(Path(folder) / HEADS[1]))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: expected the heads of a multitask model in {' and '.join(HEADS)}, got {error}"
            ) from error
        return scorer


def make_task(head: Head) -> ProbeTask:
    """Return the probing task of a head."""
    return task_class_of(head.task, f"model.heads.{head.label}.task")(**head.options)
