"""Queries that are docs of the collection (ArguAna, Quora).

The doc with a query's own id is left out of this query's ranking and negatives. Otherwise, a warning is logged.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Run

log = logging.getLogger(__name__)

MODES = ("auto", True, False)
CHECKED_QUERIES, CHECKED_DOCS = 2000, 5  # numbers of queries and of top docs per query that are compared by text
ALIKE = 0.5  # a query and a doc with the same id count as equal from this Jaccard similarity of their words on

# Collections of ir_datasets whose queries are docs. For published figures, BEIR leaves out identical ids
# (ignore_identical_ids).
_QUERIES_ARE_DOCS = re.compile(r"(^|/|-)beir/(arguana|quora)(/|$)")


def queries_are_docs(dataset_id: str) -> bool:
    """Return whether the queries of an ir_datasets id are known to be docs of its collection.

    >>> queries_are_docs("beir/arguana"), queries_are_docs("beir/quora/test"), queries_are_docs("beir/nq")
    (True, True, False)
    """
    return _QUERIES_ARE_DOCS.search(dataset_id) is not None


def apply_mode(splits: Splits, mode: str | bool) -> Splits:
    """Set `drop_query_docs` of each collection; if true, remove docs with the query's own id from the candidates.

    Args:
        splits: The splits of a source.
        mode: `auto`: each collection keeps the value of its source; True or False: the value of all collections.

    Raises:
        ConfigError: The mode is another value.
    """
    if mode not in MODES:
        raise ConfigError(f"data.drop_query_docs: expected auto, true or false; got {mode!r}")

    def applied(collection: Collection) -> Collection:
        drop = collection.drop_query_docs if mode == "auto" else bool(mode)
        return with_allowed(replace(collection, drop_query_docs=drop), collection.candidates)

    return replace(
        splits,
        train=None if splits.train is None else applied(splits.train),
        val=None if splits.val is None else applied(splits.val),
        tests={name: applied(collection) for name, collection in splits.tests.items()},
    )


def with_allowed(collection: Collection, candidates: Candidates | None) -> Collection:
    """Return the collection with these candidates; `drop_query_docs` removes docs with the query's own id."""
    if candidates is not None and collection.drop_query_docs:
        kept = ~has_own_id(candidates)
        if not kept.all():
            log.info("%s: %d candidates that have the query's own id are left out", collection.name, int((~kept).sum()))
            candidates = candidates.where(kept)
    return replace(collection, candidates=candidates)


def allowed_run(collection: Collection, run: Run) -> Run:
    """Return the run; if `collection.drop_query_docs` is true, without docs that have the query's own id."""
    if not collection.drop_query_docs:
        return run
    return {
        query_id: {doc_id: score for doc_id, score in docs.items() if doc_id != query_id}
        for query_id, docs in run.items()
    }


def has_own_id(candidates: Candidates) -> np.ndarray:
    """Return which candidates have the id of their query, bool [docs]."""
    ids = np.array([query_id.encode() for query_id in candidates.query_ids] or [b""], dtype=np.bytes_)
    return candidates.doc_ids == np.repeat(ids[: len(candidates.query_ids)], np.diff(candidates.offsets))


def warn_of_query_docs(collection: Collection, candidates: Candidates | None) -> None:
    """Warn if a query's own doc is among its candidates: a doc with the same id and a similar text, or the same text.

    The texts of the first `CHECKED_QUERIES` queries with candidates are compared with the texts of their top docs.
    """
    if candidates is None or collection.drop_query_docs:
        return
    queries = [query_id for query_id in collection.queries if query_id in candidates][:CHECKED_QUERIES]
    by_id, by_text = [], []
    for query_id in queries:
        doc_ids, text = candidates[query_id], collection.queries[query_id]
        if query_id in doc_ids and _alike(text, collection.docs[query_id].full_text):
            by_id.append(query_id)
        elif any(_same(text, collection, doc_id) for doc_id in doc_ids[:CHECKED_DOCS]):
            by_text.append(query_id)
    if by_id:
        log.warning(
            "%s: %d of %d queries are docs of the collection by id and text, such as %r, and are among their own "
            "results; data.drop_query_docs=true leaves them out, as BEIR does",
            collection.name, len(by_id), len(queries), by_id[0],
        )  # fmt: skip
    if by_text:
        log.warning(
            "%s: %d of %d queries, such as %r, have the text of a doc with another id among their top results",
            collection.name,
            len(by_text),
            len(queries),
            by_text[0],
        )


def _alike(text: str, other: str) -> bool:
    """Return whether two texts share enough words."""
    words, others = (set(re.findall(r"\w+", part.casefold())) for part in (text, other))
    return len(words & others) >= ALIKE * len(words | others)


def _same(text: str, collection: Collection, doc_id: str) -> bool:
    """Return whether a text equals a doc's text, or its title and text; case and white space are ignored."""
    doc = collection.docs[doc_id]
    return " ".join(text.casefold().split()) in {
        " ".join(part.casefold().split()) for part in (doc.text, doc.full_text)
    }


def same_text(
    queries: TokenStore,
    docs: TokenStore,
    query_rows: np.ndarray,
    doc_rows: np.ndarray,
    prompt_tokens: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Return which docs have the same tokens as their query, bool [pairs].

    If the store has truncated a query, the query is compared with the doc's first tokens.

    Args:
        queries: Token store of the queries.
        docs: Token store of the docs.
        query_rows: Rows of the query store [pairs].
        doc_rows: Rows of the doc store [pairs].
        prompt_tokens: Number of prompt tokens before each query and each doc of the stores; these tokens are not
            compared.
    """
    lengths, others = queries.lengths[query_rows] - prompt_tokens[0], docs.lengths[doc_rows] - prompt_tokens[1]
    cut = queries.lengths[query_rows] >= queries.meta["max_tokens"]
    same = (lengths > 0) & ((others == lengths) | (cut & (others > lengths)))
    pairs = np.flatnonzero(same)
    firsts = (
        queries.tokens[queries.offsets[query_rows[pairs]] + prompt_tokens[0]],
        docs.tokens[docs.offsets[doc_rows[pairs]] + prompt_tokens[1]],
    )
    same[pairs] = firsts[0] == firsts[1]
    for pair in np.flatnonzero(same):
        query = queries[int(query_rows[pair])][prompt_tokens[0] :]
        same[pair] = np.array_equal(query, docs[int(doc_rows[pair])][prompt_tokens[1] :][: len(query)])
    return same
