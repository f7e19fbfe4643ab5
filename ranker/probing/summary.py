"""What a study's numbers say, task by task: where a task is strongest, what is tied with that, and how two subjects differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ranker.errors import DataError
from ranker.probing.results import Results
from ranker.probing.statistics import (
    Difference,
    centre_of_gravity,
    compare_bits,
    detectable_by_seeds,
    expected_layer,
    holm_ties,
    last_layer_drop,
)


@dataclass(frozen=True)
class TaskSummary:
    """One subject and task.

    Args:
        best: Layer of the highest compression.
        compression: Its compression, the mean over seeds.
        compression_error: Half the least difference in compression that seeds alone would show; NaN for one seed.
        tied: Layers whose code is not longer than the best one's by more than can be seen.
        detectable: Largest of the least detectable differences to the best layer, bits a target.
        gravity: Centre of gravity above the control.
        expected: Expected layer at which the information appears.
        drop: Share of the best compression lost at the last layer.
        accuracy: At the best layer.
        macro_f1: At the best layer.
        selectivity: Accuracy minus the control task's, at the best layer; NaN without that control.
        control_ratio: Control task's length over the task's, at the best layer.
        measures: Ranking measures at the best layer, means over seeds.
    """

    best: int
    compression: float
    compression_error: float
    tied: list[int]
    detectable: float
    gravity: float
    expected: float
    drop: float
    accuracy: float
    macro_f1: float
    selectivity: float
    control_ratio: float
    measures: dict[str, float]


def summarise(results: Results, model: str, task: str) -> TaskSummary:
    """Summarise one subject and task."""
    compression = results.compression(model, task)
    best = max(compression, key=lambda layer: (compression[layer], -layer))
    to_best = layer_differences(results, model, task, best)
    own = results.by_layer(model, task)[best]
    random_encoder = results.compression(model, task, "random_encoder")
    prior = results.value(model, task, "label_prior")
    control = random_encoder or {layer: 1.0 if math.isnan(prior) else prior for layer in compression}
    told = selectivity(results, model, task)
    lengths = control_ratios(results, model, task)
    names = list(own[0].measures)
    return TaskSummary(
        best=best,
        compression=compression[best],
        compression_error=detectable_by_seeds([result.code.compression(results.units) for result in own]) / 2,
        tied=sorted([best, *(layer for layer, difference in to_best.items() if difference.tied)]),
        detectable=max((difference.detectable for difference in to_best.values()), default=math.nan),
        gravity=centre_of_gravity(compression, control),
        expected=expected_layer(compression),
        drop=last_layer_drop(compression),
        accuracy=float(np.mean([result.accuracy for result in own])),
        macro_f1=float(np.mean([result.macro_f1 for result in own])),
        selectivity=told.get(best, math.nan),
        control_ratio=lengths.get(best, math.nan),
        measures={name: float(np.mean([result.measures[name] for result in own])) for name in names},
    )


def layer_differences(results: Results, model: str, task: str, best: int) -> dict[int, Difference]:
    """Each other layer's code against the best layer's, in bits a target."""
    queries = results.tasks[task].queries
    reference, reference_seeds = results.mean_bits(model, task, best), results.seed_lengths(model, task, best)
    return {
        layer: compare_bits(
            results.mean_bits(model, task, layer),
            reference,
            queries,
            (results.seed_lengths(model, task, layer), reference_seeds),
        )
        for layer in results.by_layer(model, task)
        if layer != best
    }


def _by_control(results: Results, model: str, task: str) -> dict[int, list[tuple[float, float, float, float]]]:
    """Per layer and seed of the control task: accuracy and bits of the task and of the control."""
    main = {(result.layer, result.seed): result for result in results.of(model, task)}
    found: dict[int, list[tuple[float, float, float, float]]] = {}
    for result in results.of(model, task, "control_task"):
        own = main[result.layer, result.seed]
        assert result.layer is not None
        found.setdefault(result.layer, []).append((own.accuracy, result.accuracy, own.code.bits, result.code.bits))
    return found


def selectivity(results: Results, model: str, task: str) -> dict[int, float]:
    """Accuracy of the task minus that of its control task, by layer (Hewitt and Liang, 2019)."""
    return {
        layer: float(np.mean([a - b for a, b, _, _ in own])) for layer, own in _by_control(results, model, task).items()
    }


def control_ratios(results: Results, model: str, task: str) -> dict[int, float]:
    """Description length of the control task over that of the task, by layer."""
    return {
        layer: float(np.mean([d / c for _, _, c, d in own])) for layer, own in _by_control(results, model, task).items()
    }


@dataclass(frozen=True)
class Comparison:
    """Two subjects on one task.

    Args:
        compression: Second minus first, by layer.
        bits: Second minus first, in bits a target; below 0, the second one's code is shorter.
        p_holm: P-values, Holm's correction over the layers.
    """

    compression: dict[int, float]
    bits: dict[int, Difference]
    p_holm: dict[int, float]

    def tied(self, layer: int) -> bool:
        """Whether the difference is within what could be seen, or not significant at 5%."""
        return self.bits[layer].tied or self.p_holm[layer] > 0.05


def compare(results: Results, first: str, second: str, task: str) -> Comparison:
    """Compare two subjects layer by layer on the same targets, permutations and initial weights.

    Raises:
        DataError: Their data differ.
    """
    ours, theirs = results.of(first, task), results.of(second, task)
    if ours[0].data_hash != theirs[0].data_hash:
        raise DataError(
            f"compare: {task}: expected the same pairs, spans and labels for {first} and {second}, got data hashes {ours[0].data_hash} and "
            f"{theirs[0].data_hash}; probe both in one run with compare=FOLDER of the ranker"
        )
    seeds = ({result.seed for result in own} for own in (ours, theirs))
    if len({frozenset(own) for own in seeds}) > 1:
        raise DataError(
            f"compare: {task}: expected the same seeds for {first} and {second}; run both with the same seeds"
        )
    before, after = results.compression(first, task), results.compression(second, task)
    queries = results.tasks[task].queries
    layers = sorted(set(before) & set(after))
    bits = {
        layer: compare_bits(
            results.mean_bits(second, task, layer), results.mean_bits(first, task, layer), queries,
            (results.seed_lengths(second, task, layer), results.seed_lengths(first, task, layer)),
        )
        for layer in layers
    }  # fmt: skip
    return Comparison({layer: after[layer] - before[layer] for layer in layers}, bits, holm_ties(bits))
