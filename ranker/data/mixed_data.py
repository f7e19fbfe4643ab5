"""The data of a training on several sets: one `RankData` per set, mixed for training, separate for evaluation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from ranker.data.collate import Collator
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.mixed_plan import MixedPlan
from ranker.data.mixed_steps import MixedSteps
from ranker.data.shares import shares, whole_numbers
from ranker.data.sources.mixed import Mixed
from ranker.data.training_steps import TrainSteps
from ranker.errors import ConfigError, errors_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MixedSet:
    """One set of a mix.

    Args:
        data: The set's data, with the set's own text limits.
        weight: Factor of the set's share; 0: the set is not trained on.
        cap: Largest number of the set's groups that count for shares and for the length of an epoch; None: all count.
    """

    data: RankData
    weight: float = 1.0
    cap: int | None = None


def merged(sets: Mapping[str, Splits]) -> Splits:
    """Return the splits of a mix: the test sets of all its sets, and neither a training nor a validation set.

    A test set has the name of its set; if the set has several, the name is SET-TEST.

    >>> merged({"a": Splits(None, None, {"x": None}), "b": Splits(None, None, {"x": None, "y": None})}).tests
    {'a': None, 'b-x': None, 'b-y': None}
    """
    tests = {
        name if len(splits.tests) == 1 else f"{name}-{test}": collection
        for name, splits in sets.items()
        for test, collection in splits.tests.items()
    }
    notices = dict.fromkeys(splits.notice for splits in sets.values() if splits.notice)
    return Splits(None, None, tests, "\n".join(notices), dict(sets))


def warn_of_shared_queries(sets: Mapping[str, Splits]) -> None:
    """Warn of queries that one set trains on and another set validates or tests on; queries are compared by text."""
    held_out: dict[str, set[str]] = {}
    for name, part in sets.items():
        for collection in (part.val, *part.tests.values()):
            for text in collection.queries.values() if collection is not None else ():
                held_out.setdefault(text, set()).add(name)
    for name, part in sets.items():
        if part.train is None:
            continue
        shared = Counter(other for text in part.train.queries.values() for other in held_out.get(text, ()))
        for other, count in shared.items():
            if other != name:
                log.warning(
                    "data.sets.%s: this set trains on %d queries that %s validates or tests on (equal texts), so "
                    "measures of %s are too high; remove them from one of the two",
                    name,
                    count,
                    other,
                    other,
                )


class MixedData(RankData):
    """Data loaders of several sets. Training steps mix the sets; each set is validated and tested alone.

    Args:
        sets: Set name -> its data and share.
        options: How the sets are mixed.
        suite: Validation sets that replace those of the sets.
    """

    def __init__(
        self, sets: Mapping[str, MixedSet], options: Mixed, suite: Mapping[str, Collection] | None = None
    ) -> None:
        first = next(iter(sets.values())).data
        splits = replace(merged({name: part.data.splits for name, part in sets.items()}), suite=dict(suite or {}))
        super().__init__(
            splits, first.inputs, first.batch_options, first.limits, first.depth, first.seed, first.cache_dir,
            first.train_docs,
        )  # fmt: skip
        self.sets, self.options = dict(sets), options
        self._logged = False
        self._owners = {
            id(collection): part.data
            for part in sets.values()
            for collection in (part.data.splits.val, *part.data.splits.tests.values())
        }

    def collator(self, collection: Collection) -> Collator:
        """Return the collator of a collection's set; a collection of a suite has the first set's collator."""
        owner = self._owners.get(id(collection), next(iter(self.sets.values())).data)
        return owner.collator(collection)

    @property
    def val_sets(self) -> dict[str, Collection]:
        """Return the validation sets by name: those of the suite, or else those of the sets of the mix."""
        if self.splits.suite:
            return self.splits.suite
        found = {name: part.data.splits.val for name, part in self.sets.items()}
        return {name: collection for name, collection in found.items() if collection is not None}

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """Return one device's training steps.

        Args:
            rank: Number of the device.
            world: Number of devices.

        Raises:
            ConfigError: A set with a weight above 0 has no training queries or too small a share; or no weight is above
                0.
        """
        trained = {name: part for name, part in self.sets.items() if part.weight > 0}
        if not trained:
            raise ConfigError("data.sets: expected a weight above 0 for at least one set, got 0 for all")
        for name, part in trained.items():
            if part.data.splits.train is None:
                raise ConfigError(
                    f"data.sets.{name}: expected a source with training queries, got one without; name its training "
                    "data, or set weight=0 to validate and test on it only"
                )
        steps = {}
        for name, part in trained.items():
            with errors_of(f"data.sets.{name}"):
                steps[name] = part.data.train_steps(rank, world)
        counts = self._counts(trained, {name: len(part.sampler) for name, part in steps.items()})
        plan = MixedPlan([part.plan for part in steps.values()], counts, self.options.batches == "one_set")
        if not self._logged:
            self._logged = True
            self._log_shares(list(trained), counts, [part.plan.num_groups for part in steps.values()], len(plan))
        mixed: Any = MixedSteps(plan, steps)
        return mixed

    def _counts(self, trained: Mapping[str, MixedSet], sizes: Mapping[str, int]) -> list[int]:
        """Return the number of groups of each trained set in an epoch."""
        capped = [min(sizes[name], part.cap or sizes[name]) for name, part in trained.items()]
        parts = shares(capped, [part.weight for part in trained.values()], self.options.temperature)
        total = self.options.groups_per_epoch or sum(capped)
        counts = whole_numbers(parts, total)
        for name, count, part in zip(trained, counts, parts, strict=True):
            if not count:
                raise ConfigError(
                    f"data.sets.{name}: expected at least one group in an epoch, got none of {total} at a share of "
                    f"{part:.2g}; raise its weight, data.temperature or data.groups_per_epoch, or set weight=0"
                )
        return counts

    @rank_zero_only
    def _log_shares(self, names: list[str], counts: list[int], sizes: list[int], num_steps: int) -> None:
        total = sum(counts)
        listed = ", ".join(
            f"{name} {count} ({count / total:.1%}; the set has {size})"
            for name, count, size in zip(names, counts, sizes, strict=True)
        )
        log.info("data: an epoch has %d groups in %d steps: %s", total, num_steps, listed)
