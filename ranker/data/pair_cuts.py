"""Find the pairs that other programs truncate differently, because they shorten the longer text of a pair first."""

from __future__ import annotations

import logging

import numpy as np

from ranker.data.collate import Collator
from ranker.data.mixed_steps import MixedSteps
from ranker.data.training_steps import TrainSteps

log = logging.getLogger(__name__)

CHECKED_GROUPS = 100_000


def cut_otherwise(collator: Collator, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
    """Return which pairs the exported tokenizer's strategy `longest_first` truncates differently, bool [pairs].

    The collator shortens only the doc to fit the pair's limit; besides, each text has its own limit. With
    `longest_first`, a pair is truncated in the same way if all three conditions hold:

    - the query has fewer than `max_query_tokens` tokens,
    - the whole pair fits, or the query has at most (`max_pair_tokens` - number of special tokens) / 2 tokens, and
    - the doc has fewer than `max_doc_tokens` tokens, or `max_pair_tokens` leaves room for at most so many doc tokens.

    The store cuts long texts. So a text with the store's largest number of tokens may have been longer, and is treated
    as longer.

    Args:
        collator: Collator of a scorer that reads pairs.
        query_rows: Rows of the query store [pairs].
        doc_rows: Rows of the doc store [pairs].
    """
    queries, docs = (
        collator.queries.lengths[query_rows].astype(np.int64),
        collator.docs.lengths[doc_rows].astype(np.int64),
    )
    longer = np.where(docs >= collator.docs.meta["max_tokens"], np.int64(1 << 30), docs)
    other = _other_lengths(collator, queries, docs) | _other_lengths(collator, queries, longer)
    return other | (queries >= collator.queries.meta["max_tokens"])


def _other_lengths(collator: Collator, queries: np.ndarray, docs: np.ndarray) -> np.ndarray:
    """Return for which pairs of these lengths [pairs] `longest_first` gives other lengths, bool [pairs]."""
    room = collator.max_pair_tokens - collator.pair.num_special
    kept_queries = np.minimum(queries, collator.max_query_tokens)
    kept_docs = np.minimum(np.minimum(docs, collator.max_doc_tokens), room - kept_queries)
    short, long = np.minimum(queries, docs), np.maximum(queries, docs)
    fits = short + long <= room
    their_short = np.where(fits, short, np.minimum(short, room // 2))
    their_long = np.where(fits, long, room - their_short)
    their_queries, their_docs = np.where(queries > docs, (their_long, their_short), (their_short, their_long))
    return (kept_queries != their_queries) | (kept_docs != their_docs)


def warn_of_other_cuts(steps: TrainSteps | MixedSteps, where: str = "model/") -> None:
    """Warn of the number of pairs of the first epoch that other programs truncate differently.

    Args:
        steps: The training steps of a scorer that reads pairs; at most `CHECKED_GROUPS` groups of each set are checked.
        where: Start of the warning.
    """
    if isinstance(steps, MixedSteps):
        for name, part in steps.sets.items():
            warn_of_other_cuts(part, f"{where}, set {name}")
        return
    if steps.collator.pair.affixes or steps.collator.windows is not None:  # other programs know neither
        return
    groups = np.arange(min(len(steps.sampler), CHECKED_GROUPS))
    doc_rows, _ = steps.sampler.draw(0, groups)
    real = doc_rows >= 0
    cut = cut_otherwise(steps.collator, np.repeat(steps.sampler.query_rows[groups], real.sum(axis=1)), doc_rows[real])
    if cut.any():
        collator = steps.collator
        log.warning(
            "%s: %d of %d training pairs are truncated differently by sentence-transformers' CrossEncoder, and get "
            "other scores there: it shortens the longer text first. Both truncate a pair alike if its query has "
            "fewer than max_query_tokens=%d tokens (and at most %d if the pair has more than max_pair_tokens=%d) and "
            "its doc has fewer than max_doc_tokens=%d",
            where,
            int(cut.sum()),
            len(cut),
            collator.max_query_tokens,
            (collator.max_pair_tokens - collator.pair.num_special) // 2,
            collator.max_pair_tokens,
            collator.max_doc_tokens,
        )
