"""Turn coded jobs into results with ranking measures, and compute the results of the label prior."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranker.data.collection import Collection
from ranker.evaluation.metrics import evaluate
from ranker.probing.code_length import CodeLength, accuracy, counting_code, macro_f1, portion_ends
from ranker.probing.coding_jobs import Outcome
from ranker.probing.label_store import ProbeData
from ranker.probing.online_code import permutation
from ranker.probing.results import LENIENT, RANKING, Result
from ranker.probing.subject import Subject

RELABELLED = ("control_task", "shuffled")  # controls whose labels are not relevance


def result_of(
    subject: Subject, data: ProbeData, outcome: Outcome, portions: Sequence[float], collection: Collection
) -> Result:
    """Return the result of one layer, seed and label set.

    Args:
        subject: The subject.
        data: The task's data.
        outcome: Code and test results.
        portions: Ends of the blocks, as shares of the training pairs.
        collection: Judgements for the ranking measures.
    """
    label_set = outcome.label_set
    ranks = data.task.ranks and label_set.control not in RELABELLED
    return Result(
        model=subject.name,
        task=data.task.name,
        layer=None if label_set.control == "surface" else outcome.layer,
        seed=outcome.seed,
        control=label_set.control,
        code=outcome.code,
        prior_bits=float(_prior_bits(data, label_set.labels, outcome.seed, portions)[0].sum()),
        accuracy=outcome.accuracy,
        macro_f1=outcome.macro_f1,
        measures=ranking_measures(data, outcome.scores, collection) if ranks else {},
        epochs=outcome.epochs,
        seconds=outcome.seconds,
        data_hash=data.fingerprint,
        model_hash=subject.fingerprint,
        bits=outcome.bits,
        block_ends=outcome.block_ends,
        block_bits=outcome.block_bits,
    )


def ranking_measures(data: ProbeData, scores: np.ndarray, collection: Collection) -> dict[str, float]:
    """Return the ranking measures of the test queries, whose docs are ranked by score.

    The measures in `RANKING` use the collection's relevance threshold. If this threshold is above 1, the measures in
    `LENIENT`, with threshold 1, are added.

    Args:
        data: The task's data.
        scores: Log-odds of class 1 against class 0 of each test target.
        collection: Judgements.

    Returns:
        measure -> mean over the test queries
    """
    run: dict[str, dict[str, float]] = {}
    for pair, score in zip(data.pairs_in("test"), scores, strict=True):
        example = data.examples[pair]
        run.setdefault(example.query_id, {})[example.doc_id] = float(score)
    qrels = {query_id: collection.qrels[query_id] for query_id in run if query_id in collection.qrels}
    measures = dict(zip(RANKING, evaluate(run, qrels, RANKING, collection.relevance).means.values(), strict=True))
    if collection.relevance > 1:
        measures |= dict(zip(LENIENT, evaluate(run, qrels, LENIENT, 1).means.values(), strict=True))
    return measures


def prior_result(subject: Subject, data: ProbeData, seed: int, portions: Sequence[float]) -> Result:
    """Return the result of the label prior, a probe without input, in closed form.

    Args:
        subject: The subject.
        data: The task's data.
        seed: Seed of the permutation.
        portions: Ends of the blocks, as shares of the training pairs.
    """
    bits, block_ends = _prior_bits(data, data.labels, seed, portions)
    train = data.pairs_in("train")
    targets = data.targets_of(train[permutation(seed, len(train))])
    bits_by_pair = np.empty(len(bits), dtype=np.float32)
    bits_by_pair[np.argsort(np.argsort(targets))] = bits
    first, classes = block_ends[0], len(data.classes)
    truth = data.labels[data.target_parts == "test"]
    predicted = np.full(len(truth), np.bincount(data.labels[data.target_parts == "train"]).argmax())
    return Result(
        model=subject.name,
        task=data.task.name,
        layer=None,
        seed=seed,
        control="label_prior",
        code=CodeLength(classes, first, len(bits), float(bits[first:].sum())),
        prior_bits=float(bits.sum()),
        accuracy=accuracy(predicted, truth),
        macro_f1=macro_f1(predicted, truth),
        measures={},
        epochs=0.0,
        seconds=0.0,
        data_hash=data.fingerprint,
        model_hash=subject.fingerprint,
        bits=bits_by_pair,
        block_ends=block_ends,
        block_bits=[float(part.sum()) for part in np.split(bits, block_ends[:-1])],
    )


def _prior_bits(
    data: ProbeData, labels: np.ndarray, seed: int, portions: Sequence[float]
) -> tuple[np.ndarray, list[int]]:
    """Return each training target's bits with the label prior, in the seed's order, and the block ends in targets."""
    train = data.pairs_in("train")
    order = train[permutation(seed, len(train))]
    sizes = np.cumsum(np.diff(data.pair_starts)[order])
    ends = [int(sizes[end - 1]) for end in portion_ends(len(train), portions)]
    return counting_code(labels[data.targets_of(order)], ends, len(data.classes)), ends
