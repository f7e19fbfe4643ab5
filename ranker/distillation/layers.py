"""Options of `distill=layers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranker.errors import ConfigError

MAPS = ("uniform", "last", "auto")


@dataclass(frozen=True)
class Layers:
    """Parts of the distillation loss and their weights.

    The loss of a group is the weighted sum of the parts below. A part that compares layers is averaged over the layers.

    Args:
        teacher: Run folder or model folder of a cross-encoder with the student's tokenizer.
        layers: The teacher's layer for each layer of the student: `uniform`, `last`, `auto` (see `layer_map`), or a
            list of numbers from 1.
        report: For `layers=auto`: folder of a probing run of the teacher.
        start: Whether a new student starts with the teacher's layers, embeddings and head, where shapes are equal. A
            student that is loaded with `checkpoint=` keeps its own weights.
        labels: Weight of the loss on the labels, which `loss=` selects.
        scores: Weight of the squared error between the scores of student and teacher.
        states: Weight of the squared error between hidden states, embeddings included (TinyBERT, Jiao et al., 2020,
            arXiv:1909.10351, equations 8 and 9). If the hidden sizes differ, each layer gets a trained linear map.
        attention: Weight of the Kullback-Leibler divergence of attention distributions (MobileBERT, Sun et al., 2020,
            arXiv:2004.02984, section 3.4).

    Raises:
        ConfigError: A weight is below 0, all weights are 0, or `layers` has none of the values above.
    """

    teacher: Path
    layers: int | str | list[int] = "uniform"
    report: Path | None = None
    start: bool = True
    labels: float = 1.0
    scores: float = 1.0
    states: float = 1.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        weights = {key: getattr(self, key) for key in ("labels", "scores", "states", "attention")}
        for key, weight in weights.items():
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"distill.{key}: expected a finite weight of at least 0, got {weight}")
        if not any(weights.values()):
            raise ConfigError("distill: expected a weight above 0 among labels, scores, states and attention, got none")
        chosen: Any = self.layers
        chosen = [chosen] if isinstance(chosen, int) else chosen
        numbers = not isinstance(chosen, str) and all(isinstance(layer, int) and layer >= 1 for layer in chosen)
        if chosen not in MAPS and not numbers:
            raise ConfigError(f"distill.layers: expected {', '.join(MAPS)} or a list of layers from 1, got {chosen!r}")
        if chosen == "auto" and self.report is None:
            raise ConfigError("distill.report: expected a probing run of the teacher with layers=auto, got none")
