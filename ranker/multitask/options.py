"""What a multitask training is asked for: heads, labels, sampling, weighting.

Knows no torch, so that mistakes are answered at once.
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
        task: A probing task, a file in `ranker/probing/tasks`.
        layer: What the head reads: a layer (0 is the embeddings), a list of layers (their learned mix), `middle`,
            `last`, or `auto`.
        pooling: `cls`, `mean` (the row's tokens) or `span` (the mean of each of the target's spans, one after another);
            None takes `span` for tasks about words and `mean` for tasks about whole texts.
        regression: Learn the task's number, scaled to 0 to 1, instead of its bin.
        weight: Factor on the task's loss, beside the weighting's.
        classes: Labels of a task whose set of labels is open.
        name: Name in logs and files; None: the task's.
        options: The task's own options, as in `conf/probe/TASK.yaml`.
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
        """The layers that are read.

        Raises:
            ConfigError: The encoder has no such layer.

        >>> Head("bm25").resolved_layers(12), Head("bm25", layer=[1, 2]).resolved_layers(2)
        ((6,), (1, 2))
        """
        named: dict[Any, Any] = {"middle": (num_layers + 1) // 2, "last": num_layers}
        asked = self.layer if isinstance(self.layer, (list, tuple)) else [self.layer]
        layers = tuple(named.get(layer, layer) for layer in asked)
        for layer in layers:
            if not isinstance(layer, int) or not 0 <= layer <= num_layers:
                raise ConfigError(
                    f"model.heads.{self.label}.layer: expected 0 (the embeddings) to {num_layers} for this encoder, got {layer!r}; "
                    "take a lower layer, middle or last"
                )
        return layers

    def record(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self)


@dataclass(frozen=True)
class AutoLayers:
    """Where `layer: auto` looks.

    Args:
        report: Folder of a finished probing run (`python probe.py`); its first model counts.
        last_layer: Whether the last layer, ranking's own, may be chosen.
    """

    report: str | Path | None = None
    last_layer: bool = True


@dataclass(frozen=True)
class TaskLabels:
    """Pairs of training queries and docs that auxiliary labels are made for.

    Args:
        max_pairs: At most so many pairs that the tasks share, and so many of a task that brings its own.
        docs_per_query: Docs drawn from each query's candidates.
        depth: Candidates of a query to draw from.
    """

    max_pairs: int = 20_000
    docs_per_query: int = 10
    depth: int = 100

    def __post_init__(self) -> None:
        for name in ("max_pairs", "docs_per_query", "depth"):
            at_least(f"model.labels.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class TaskSampling:
    """How often each task is trained on; shares are of encoder rows.

    Args:
        composition: `mixed` (all tasks' rows in each step, one encoder pass) or `homogeneous` (one task a step).
        mode: `proportional`, `uniform`, `temperature` or `annealed`.
        main_fraction: Fixed share of ranking's rows; the rest is split by `mode`. None: ranking takes part in `mode`.
        temperature: Of mode temperature: 1 is proportional, infinity is uniform.
        cap: Of mode temperature: tasks count for no more rows than this.
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
                f"model.sampling.main_fraction: expected a number above 0 and below 1, or null; got {self.main_fraction!r}"
            )
        if self.temperature != math.inf:
            at_least("model.sampling.temperature", self.temperature, 1)
        if self.cap is not None:
            at_least("model.sampling.cap", self.cap, 1)


@dataclass(frozen=True)
class TaskWeighting:
    """What the tasks' losses and gradients count.

    Args:
        mode: `static` (the heads' weights), `log_k` (over ln of the number of classes), `row_mean` (each row of a step
            counts the same), `uncertainty` or `gradnorm` (learned).
        surgery: `none`, `pcgrad` (every task's gradient gives way to the others') or `guard` (auxiliary gradients give
            way to ranking's).
        lr: Of modes uncertainty and gradnorm: their own learning rate.
        alpha: Of mode gradnorm: how strongly tasks that learn slowly are favoured.
        cosine_every: Log the cosine of ranking's and each task's gradient at every so many-th logged step that has
            both; 0: never.
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
    """Refuse another value than the known ones."""
    if got not in known:
        raise ConfigError(f"{key}: expected one of {', '.join(known)}; got {got!r}")


def at_least(key: str, got: Any, least: float) -> None:
    """Refuse what is no number, or a smaller one."""
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not math.isfinite(got) or got < least:
        raise ConfigError(f"{key}: expected a number of at least {least}, got {got!r}")
