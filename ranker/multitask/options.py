"""Options of a multitask training: heads, labels, sampling, weighting.

This module does not import torch, so that mistakes are reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ranker.errors import ConfigError

RANKING = "ranking"  # the name of the main task in logs
POOLINGS = ("cls", "mean", "span")
NAMED_LAYERS = ("middle", "last", "auto")
COMPOSITIONS = ("mixed", "homogeneous")
SAMPLINGS = ("proportional", "uniform", "temperature", "annealed")
WEIGHTINGS = ("static", "log_k", "row_mean", "uncertainty", "gradnorm")
SURGERIES = ("none", "pcgrad", "guard")


@dataclass(frozen=True)
class Head:
    """An auxiliary task and the head that learns it.

    Args:
        task: A probing task, the name of a file in `ranker/probing/tasks`.
        layer: Layer that the head reads (0 is the embeddings), a list of layers (a learned mix of them), `middle`,
            `last`, or `auto`.
        pooling: `cls`, `mean` (over the row's tokens) or `span` (the means over each of the target's spans,
            concatenated); None: `span` for tasks about words, `mean` for tasks about whole texts.
        regression: Whether the head predicts the task's number, scaled to 0 to 1, in place of its bin.
        weight: Factor of the task's loss, besides the factor of `TaskWeighting`.
        classes: All labels, for a task that does not list its labels.
        name: Name in logs and files; None: the name of the task.
        options: Options of the task, which are keys of `conf/probe/TASK.yaml`.
    """

    task: str
    layer: int | str | list = "middle"
    pooling: str | None = None
    regression: bool = False
    weight: float = 1.0
    classes: list | None = None
    name: str | None = None
    options: dict = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The head's name."""
        return self.name or self.task

    def resolved_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of the layers that the head reads.

        Args:
            num_layers: Number of layers of the encoder.

        Raises:
            ConfigError: The encoder lacks a layer.

        >>> Head("bm25").resolved_layers(12), Head("bm25", layer=[1, 2]).resolved_layers(2)
        ((6,), (1, 2))
        """
        named: dict[Any, Any] = {"middle": (num_layers + 1) // 2, "last": num_layers}
        requested = self.layer if isinstance(self.layer, (list, tuple)) else [self.layer]
        layers = tuple(named.get(layer, layer) for layer in requested)
        for layer in layers:
            if not isinstance(layer, int) or not 0 <= layer <= num_layers:
                raise ConfigError(
                    f"model.heads.{self.label}.layer: expected 0 (the embeddings) to {num_layers} for this encoder, "
                    f"got {layer!r}; take a lower layer, middle or last"
                )
        return layers

    def record(self) -> dict[str, Any]:
        """Return the fields as plain values for a file."""
        return asdict(self)


@dataclass(frozen=True)
class AutoLayers:
    """The probing report and the allowed layers of `layer: auto`.

    Args:
        report: Folder of a finished probing run (`python probe.py`), whose first model is used.
        last_layer: Whether the last layer, which the ranking head reads, may be chosen.
    """

    report: str | Path | None = None
    last_layer: bool = True


@dataclass(frozen=True)
class TaskLabels:
    """The pairs of training queries and docs that get auxiliary labels.

    Args:
        max_pairs: Maximum number of pairs that tasks share, and maximum number of pairs of a task with its own pairs.
        docs_per_query: Maximum number of docs drawn from each query's candidates.
        depth: Docs are drawn from this number of top candidates of a query.
    """

    max_pairs: int = 20_000
    docs_per_query: int = 10
    depth: int = 100

    def __post_init__(self) -> None:
        for name in ("max_pairs", "docs_per_query", "depth"):
            at_least(f"model.labels.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class TaskSampling:
    """How often each task is trained on. All shares are shares of the encoder's rows.

    Args:
        composition: `mixed`: each step has rows of all tasks, in one encoder pass. `homogeneous`: each step has one
            task.
        mode: `proportional`, `uniform`, `temperature` or `annealed`.
        main_fraction: Share of ranking; `mode` divides the rest among the other tasks. None: `mode` also decides the
            share of ranking.
        temperature: For mode temperature: 1 is proportional, infinity is uniform.
        cap: For mode temperature: largest number of rows with which a task counts.
    """

    composition: str = "mixed"
    mode: str = "uniform"
    main_fraction: float | None = 0.8
    temperature: float = 2.0
    cap: int | None = None

    def __post_init__(self) -> None:
        one_of("model.sampling.composition", self.composition, COMPOSITIONS)
        one_of("model.sampling.mode", self.mode, SAMPLINGS)
        if self.main_fraction is not None and not 0 < self.main_fraction < 1:
            raise ConfigError(
                "model.sampling.main_fraction: expected a number above 0 and below 1, or null; "
                f"got {self.main_fraction!r}"
            )
        if self.temperature != math.inf:
            at_least("model.sampling.temperature", self.temperature, 1)
        if self.cap is not None:
            at_least("model.sampling.cap", self.cap, 1)


@dataclass(frozen=True)
class TaskWeighting:
    """How the losses and gradients of the tasks are weighted.

    Args:
        mode: `static`: the heads' weights. `log_k`: these weights divided by ln of the number of classes. `row_mean`:
            equal weight for each row of a step. `uncertainty` and `gradnorm`: learned weights.
        surgery: `none`; `pcgrad`: the gradient of every task is projected if it conflicts with that of another task;
            `guard`: the gradients of auxiliary tasks are projected if they conflict with that of ranking.
        lr: For modes uncertainty and gradnorm: learning rate of the weights.
        alpha: For mode gradnorm: how strongly slowly learning tasks are favoured.
        cosine_every: At every n-th logged step, the cosine between the gradients of ranking and of each other task is
            logged, if the step has rows of both; 0: never.
    """

    mode: str = "log_k"
    surgery: str = "none"
    lr: float = 0.025
    alpha: float = 1.5
    cosine_every: int = 5

    def __post_init__(self) -> None:
        one_of("model.weighting.mode", self.mode, WEIGHTINGS)
        one_of("model.weighting.surgery", self.surgery, SURGERIES)
        for name in ("lr", "alpha", "cosine_every"):
            at_least(f"model.weighting.{name}", getattr(self, name), 0)


def one_of(key: str, got: Any, known: Sequence[str]) -> None:
    """Raise ConfigError if `got` is not a known value."""
    if got not in known:
        raise ConfigError(f"{key}: expected one of {', '.join(known)}; got {got!r}")


def at_least(key: str, got: Any, least: float) -> None:
    """Raise ConfigError if `got` is not a finite number of at least `least`."""
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not math.isfinite(got) or got < least:
        raise ConfigError(f"{key}: expected a number of at least {least}, got {got!r}")
