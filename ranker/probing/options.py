"""Options of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ranker.errors import ConfigError
from ranker.probing.code_length import FRACTIONS, UNITS
from ranker.probing.controls import CONTROLS, check_controls
from ranker.probing.training_options import TrainingOptions


@dataclass(frozen=True)
class StudyOptions:
    """The options of a study, which are keys of `conf/probe.yaml`.

    Args:
        seeds: Each seed gives a permutation of the training pairs and a set of initial weights.
        controls: Names of controls.
        control_seeds: Controls are trained with this many of `seeds`, the first ones.
        layers: Layers to probe; None: all.
        portions: Ends of the blocks in which labels are sent (online code, see `code_length`), as shares of the
            training pairs.
        validation: `fixed` or `within`, see `OnlineCoder`.
        units: Unit of the code lengths that compression compares: `bits`, or `legacy_mixed` (the first block in bits,
            later ones in nats).
        batching: `auto`, `separate` or `stacked`, see `OnlineCoder`.
        group_by: Unit that train, val and test may not share: `query`, `doc` or `pair`.
        val_fraction: Share of the validation part.
        test_fraction: Share of the test part.
        max_query_tokens: Maximum tokens of a query.
        max_doc_tokens: Maximum tokens of a doc.
        skip_unavailable: Whether a task whose labels need a missing package or file is skipped with a warning.
        seed: Seed of control labels and random weights.
        workers: Processes that train probes on a CPU; None: one per core.
        reuse: Whether to use finished blocks of an earlier run.

    Raises:
        ConfigError: An unknown control or unit, or seeds that are missing, negative or repeated.
    """

    seeds: Sequence[int] = (0, 1, 2)
    controls: Sequence[str] = CONTROLS
    control_seeds: int = 1
    layers: Sequence[int] | None = None
    portions: Sequence[float] = FRACTIONS
    validation: str = "fixed"
    units: str = "bits"
    batching: str = "auto"
    group_by: str = "query"
    val_fraction: float = 1 / 6
    test_fraction: float = 1 / 6
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    skip_unavailable: bool = False
    seed: int = 0
    workers: int | None = None
    reuse: bool = True

    def __post_init__(self) -> None:
        check_controls(self.controls)
        if self.units not in UNITS:
            raise ConfigError(f"units: expected one of {', '.join(UNITS)}; got {self.units!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"seeds: expected different numbers of at least 0, got {list(self.seeds)}")

    def coding(self, training: TrainingOptions, dtype: str) -> dict[str, Any]:
        """Return the options that change code lengths; they are stored, so that only comparable codes are compared.

        Args:
            training: How the probes are trained.
            dtype: Type of the stored states.
        """
        names = ("validation", "max_query_tokens", "max_doc_tokens")
        options = {name: getattr(self, name) for name in names}
        options |= {f"training.{name}": value for name, value in asdict(training).items()}
        return {"portions": list(self.portions), "cache.dtype": dtype} | options
