"""From coded jobs to results: ranking measures, the label prior, rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranker.data.collection import Collection
from ranker.evaluation.metrics import evaluate
from ranker.probing.code_length import CodeLength, accuracy, counting_code, macro_f1, portion_ends
from ranker.probing.label_store import ProbeData
from ranker.probing.online_code import Outcome, permutation
from ranker.probing.results import LENIENT, RANKING, Result
from ranker.probing.subject import Subject

RELABELLED = ("control_task", "shuffled")  # controls whose labels are not relevance


def result_of(
    subject: Subject, data: ProbeData, outcome: Outcome, portions: Sequence[float], collection: Collection
) -> Result:
    """The row of a layer, seed and label set."""
    column = outcome.column
    measures = (
        ranking_measures(data, outcome.scores, collection)
        if data.task.ranks and column.control not in RELABELLED
        else {}
    )
    return Result(
        subject.name,
        data.task.name,
        None if column.control == "surface" else outcome.layer,
        outcome.seed,
        column.control,
        outcome.code,
        float(_prior_bits(data, column.labels, outcome.seed, portions)[0].sum()),
        outcome.accuracy,
        outcome.macro_f1,
        measures,
        outcome.epochs,
        outcome.seconds,
        data.fingerprint,
        subject.fingerprint,
        outcome.bits,
        outcome.block_ends,
        outcome.block_bits,
    )


def ranking_measures(data: ProbeData, scores: np.ndarray, collection: Collection) -> dict[str, float]:
    """Measures of the test queries' docs ordered by score; with the collection's threshold, and also with 1 where that is another.

    Args:
        data: The task.
        scores: Log-odds of class 1 of each test target.
        collection: Its judgements.
    """
    run: dict[str, dict[str, float]] = {}
    for place, score in zip(data.pairs_in("test"), scores, strict=True):
        example = data.examples[place]
        run.setdefault(example.query_id, {})[example.doc_id] = float(score)
    qrels = {query_id: collection.qrels[query_id] for query_id in run if query_id in collection.qrels}
    found = dict(zip(RANKING, evaluate(run, qrels, RANKING, collection.relevance).means.values(), strict=True))
    if collection.relevance > 1:
        found |= dict(zip(LENIENT, evaluate(run, qrels, LENIENT, 1).means.values(), strict=True))
    return found


def prior_result(subject: Subject, data: ProbeData, seed: int, portions: Sequence[float]) -> Result:
    """The label prior: a probe without input, in closed form."""
    bits, block_ends = _prior_bits(data, data.labels, seed, portions)
    in_order = data.targets_of(data.pairs_in("train")[permutation(seed, len(data.pairs_in("train")))])
    own = np.empty(len(bits), dtype=np.float32)
    own[np.argsort(np.argsort(in_order))] = bits
    first, classes = block_ends[0], len(data.classes)
    code = CodeLength(classes, first, len(bits), float(bits[first:].sum()))
    truth = data.labels[data.target_parts == "test"]
    told = np.full(len(truth), np.bincount(data.labels[data.target_parts == "train"]).argmax())
    block_bits = [float(part.sum()) for part in np.split(bits, block_ends[:-1])]
    return Result(
        subject.name,
        data.task.name,
        None,
        seed,
        "label_prior",
        code,
        float(bits.sum()),
        accuracy(told, truth),
        macro_f1(told, truth),
        {},
        0.0,
        0.0,
        data.fingerprint,
        subject.fingerprint,
        own,
        block_ends,
        block_bits,
    )


def _prior_bits(
    data: ProbeData, labels: np.ndarray, seed: int, portions: Sequence[float]
) -> tuple[np.ndarray, list[int]]:
    """Bits of each training target under the label prior in the seed's order, and where its blocks end, in targets."""
    train = data.pairs_in("train")
    order = train[permutation(seed, len(train))]
    sizes = np.cumsum(np.diff(data.pair_starts)[order])
    ends = [int(sizes[end - 1]) for end in portion_ends(len(train), portions)]
    return counting_code(labels[data.targets_of(order)], ends, len(data.classes)), ends
