"""Hard negatives: docs that a search ranks high and that are not judged relevant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ranker.data.collection import Candidates, Collection, Doc
from ranker.errors import ConfigError
from ranker.hashing import mix
from ranker.types import Run

log = logging.getLogger(__name__)

ORDERS = ("top", "random")


@dataclass(frozen=True)
class Mining:
    """Options that choose which docs of a ranking become negatives.

    Args:
        first: Best rank of the window; 1 is the top.
        last: Worst rank of the window.
        count: Maximum number of negatives per query.
        order: Which docs of the window are taken first: the `top` ones, or `random` ones.
        margin: Minimum of the score of the query's best positive minus the score of a negative; None: no limit.
        teacher_margin: The same for the scores of a teacher (a cross-encoder). It keeps unjudged positives out of the
            negatives (denoising; Qu et al., 2021). A doc without a teacher's score is left out.
        seed: Seed of the random draws.
    """

    first: int = 1
    last: int = 100
    count: int = 30
    order: str = "top"
    margin: float | None = None
    teacher_margin: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ConfigError(f"mining.first: expected 1 to mining.last={self.last}, got {self.first}")
        if self.count < 1:
            raise ConfigError(f"mining.count: expected at least 1, got {self.count}")
        if self.order not in ORDERS:
            raise ConfigError(f"mining.order: expected one of {', '.join(ORDERS)}; got {self.order!r}")


def mine(
    ranking: Candidates,
    collection: Collection,
    options: Mining,
    score: Callable[[str, Sequence[str]], dict[str, float]] | None = None,
    teacher: Run | None = None,
) -> Run:
    """Choose hard negatives from a search for the training queries.

    Whatever the options, these docs are never negatives of a query: docs judged with grade `collection.relevance` or
    higher, docs with the same text as one of those, and docs with the query's id or text.

    Args:
        ranking: The result of the search, best first.
        collection: Queries and judgements.
        options: Which docs to choose.
        score: Returns the search engine's scores of docs for a query; needed with `margin`.
        teacher: A teacher's run that contains docs of the window and positives, for denoising.

    Returns:
        query_id -> doc_id -> score of the search. Queries without a negative are left out, and counted in the log.
    """
    run: Run = {}
    without = 0
    for number, query_id in enumerate(ranking.query_ids):
        positives = {
            doc_id for doc_id, grade in collection.qrels.get(query_id, {}).items() if grade >= collection.relevance
        }
        ids, scores = ranking[query_id][: options.last], ranking.scores_of(query_id)[: options.last].tolist()
        texts = {_plain(collection.docs[doc_id].full_text) for doc_id in positives if doc_id in collection.docs}
        texts.add(_plain(collection.queries[query_id]))
        window = [
            (doc_id, value)
            for doc_id, value in list(zip(ids, scores, strict=True))[options.first - 1 :]
            if doc_id not in positives and doc_id != query_id and texts.isdisjoint(_texts_of(collection.docs[doc_id]))
        ]
        if options.margin is not None:
            assert score is not None
            best = max(score(query_id, sorted(positives)).values(), default=-np.inf)
            window = [(doc_id, value) for doc_id, value in window if value <= best - options.margin]
        if teacher is not None:
            teacher_scores = teacher.get(query_id, {})
            best = max((teacher_scores[doc_id] for doc_id in positives if doc_id in teacher_scores), default=-np.inf)
            window = [
                (doc_id, value)
                for doc_id, value in window
                if teacher_scores.get(doc_id, np.inf) <= best - options.teacher_margin
            ]
        if options.order == "random":
            keys = mix(options.seed, number, np.arange(len(window)))
            window = [window[i] for i in np.argsort(keys, kind="stable")]
        if window:
            run[query_id] = dict(window[: options.count])
        else:
            without += 1
    if without:
        log.warning(
            "mining: %d of %d queries have no doc left to be a negative; train with data.random_negatives=true, "
            "or widen the window",
            without,
            len(ranking.query_ids),
        )
    return run


def _plain(text: str) -> str:
    """Return a text with case folded and white space normalised, for comparison."""
    return " ".join(text.casefold().split())


def _texts_of(doc: Doc) -> set[str]:
    """Return a doc's text without and with its title."""
    return {_plain(doc.text), _plain(doc.full_text)}
