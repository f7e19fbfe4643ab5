"""Summarise results: the best layer of each task, the layers tied with it, and differences between two subjects."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ranker.errors import DataError
from ranker.probing.results import Result, Results
from ranker.probing.statistics import (
    Difference,
    centre_of_gravity,
    compare_bits,
    detectable_by_seeds,
    expected_layer,
    holm_by_layer,
    last_layer_drop,
)


@dataclass(frozen=True)
class TaskSummary:
    """Summary of one subject and task.

    Args:
        best: Layer with the highest compression.
        compression: Mean compression of the best layer over seeds.
        compression_error: Half the least difference in compression that is detectable over seeds; NaN for one seed.
        tied: The best layer, and all layers whose difference to the best layer is at most the least detectable
            difference.
        detectable: Maximum over layers of the least detectable difference to the best layer, in bits per target.
        gravity: Centre of gravity of the compression above the control.
        expected: Expected layer at which the information appears.
        drop: Share of the best compression that is lost at the last layer.
        accuracy: Accuracy at the best layer.
        macro_f1: Macro F1 at the best layer.
        selectivity: Accuracy minus the accuracy of the control task, at the best layer; NaN without this control.
        control_ratio: Description length of the control task divided by that of the task, at the best layer; NaN
            without this control.
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
    """Summarise one subject and task.

    The centre of gravity is computed against the random encoder, or against the label prior if there is none.
    """
    compression = results.compression(model, task)
    best = max(compression, key=lambda layer: (compression[layer], -layer))
    to_best = layer_differences(results, model, task, best)
    by_seed = results.by_layer(model, task)[best]
    random_encoder = results.compression(model, task, "random_encoder")
    prior = results.value(model, task, "label_prior")
    control = random_encoder or {layer: 1.0 if math.isnan(prior) else prior for layer in compression}
    return TaskSummary(
        best=best,
        compression=compression[best],
        compression_error=detectable_by_seeds([result.code.compression(results.units) for result in by_seed]) / 2,
        tied=sorted([best, *(layer for layer, difference in to_best.items() if difference.tied)]),
        detectable=max((difference.detectable for difference in to_best.values()), default=math.nan),
        gravity=centre_of_gravity(compression, control),
        expected=expected_layer(compression),
        drop=last_layer_drop(compression),
        accuracy=float(np.mean([result.accuracy for result in by_seed])),
        macro_f1=float(np.mean([result.macro_f1 for result in by_seed])),
        selectivity=selectivity(results, model, task).get(best, math.nan),
        control_ratio=control_ratios(results, model, task).get(best, math.nan),
        measures={name: float(np.mean([result.measures[name] for result in by_seed])) for name in by_seed[0].measures},
    )


def layer_differences(results: Results, model: str, task: str, best: int) -> dict[int, Difference]:
    """Return the code length of each other layer minus that of the best layer, in bits per target."""
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


def _with_control_task(results: Results, model: str, task: str) -> dict[int, list[tuple[Result, Result]]]:
    """Return layer -> (result of the task, result of the control task) for each seed of the control task."""
    main = {(result.layer, result.seed): result for result in results.of(model, task)}
    layers: dict[int, list[tuple[Result, Result]]] = {}
    for result in results.of(model, task, "control_task"):
        assert result.layer is not None
        layers.setdefault(result.layer, []).append((main[result.layer, result.seed], result))
    return layers


def selectivity(results: Results, model: str, task: str) -> dict[int, float]:
    """Return the accuracy of the task minus that of its control task, by layer (Hewitt and Liang, 2019)."""
    return {
        layer: float(np.mean([main.accuracy - control.accuracy for main, control in seeds]))
        for layer, seeds in _with_control_task(results, model, task).items()
    }


def control_ratios(results: Results, model: str, task: str) -> dict[int, float]:
    """Return the description length of the control task divided by that of the task, by layer."""
    return {
        layer: float(np.mean([control.code.bits / main.code.bits for main, control in seeds]))
        for layer, seeds in _with_control_task(results, model, task).items()
    }


@dataclass(frozen=True)
class Comparison:
    """Comparison of two subjects on one task.

    Args:
        compression: Compression of the second subject minus that of the first, by layer.
        bits: Code length of the second subject minus that of the first, in bits per target; negative if the second is
            shorter.
        p_holm: p-values by layer, with Holm's correction over the layers.
    """

    compression: dict[int, float]
    bits: dict[int, Difference]
    p_holm: dict[int, float]

    def tied(self, layer: int) -> bool:
        """Return whether the difference is at most the least detectable difference, or is not significant at 5%."""
        return self.bits[layer].tied or self.p_holm[layer] > 0.05


def compare(results: Results, first: str, second: str, task: str) -> Comparison:
    """Compare two subjects layer by layer on the same targets, permutations and initial weights.

    Raises:
        DataError: The subjects' data or seeds differ.
    """
    before_results, after_results = results.of(first, task), results.of(second, task)
    hashes = before_results[0].data_hash, after_results[0].data_hash
    if hashes[0] != hashes[1]:
        raise DataError(
            f"compare: {task}: expected the same pairs, spans and labels for {first} and {second}, got data hashes "
            f"{hashes[0]} and {hashes[1]}; probe both in one run with compare=FOLDER of the ranker"
        )
    if {result.seed for result in before_results} != {result.seed for result in after_results}:
        raise DataError(
            f"compare: {task}: expected the same seeds for {first} and {second}; run both with the same seeds"
        )
    before, after = results.compression(first, task), results.compression(second, task)
    queries = results.tasks[task].queries
    layers = sorted(set(before) & set(after))
    bits = {
        layer: compare_bits(
            results.mean_bits(second, task, layer),
            results.mean_bits(first, task, layer),
            queries,
            (results.seed_lengths(second, task, layer), results.seed_lengths(first, task, layer)),
        )
        for layer in layers
    }
    return Comparison({layer: after[layer] - before[layer] for layer in layers}, bits, holm_by_layer(bits))
