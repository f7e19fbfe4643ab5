"""Options of training data: sizes of batches, and sources of the docs and labels of training groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BatchOptions:
    """Sizes of optimizer steps and micro-batches.

    Args:
        queries: Number of query groups per optimizer step, over all devices.
        docs: Number of docs per group.
        max_tokens: Token budget of a micro-batch on one device.
        eval_max_tokens: Token budget of a scoring batch; None: `max_tokens`.
        positives: Number of relevant docs per group.
        depth: Negatives are drawn from this many top candidates.
        min_micro_batches: Smallest number of micro-batches per device and step (`trainer.accumulate_grad_batches`).
        workers: Number of worker processes that prefetch batches.
        grows: Whether a training raises `max_tokens` if the largest group does not fit.
        novelty: A doc whose similarity to a better doc of its group is at least this gets label 0 (`NovelGroups`).
            None: labels do not change.
    """

    queries: int = 32
    docs: int = 8
    max_tokens: int = 16384
    eval_max_tokens: int | None = None
    positives: int = 1
    depth: int = 100
    min_micro_batches: int = 1
    workers: int = 0
    grows: bool = False
    novelty: float | None = None


@dataclass(frozen=True)
class TrainDocs:
    """Where docs and labels of training groups come from, if not only from the candidates and judgements.

    Args:
        negatives: Path of a run of mined negatives, drawn in place of the candidates; None: the candidates.
        teacher: Path of a teacher's run whose scores are the labels; None: the judgements.
        random_negatives: Whether groups with too few negatives are filled with random docs of the corpus.
        in_batch: Whether a step's groups use each other's docs as negatives (`TrainStep.contrast`).
        whole_step: Whether steps have `contrast` even if `in_batch` is false, for a loss over all texts of a step.
    """

    negatives: str | Path | None = None
    teacher: str | Path | None = None
    random_negatives: bool = False
    in_batch: bool = False
    whole_step: bool = False
