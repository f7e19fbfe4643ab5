"""In-batch negatives: decide which docs of a step's other groups a query ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ranker.data.collate import Collator
from ranker.data.collection import Collection
from ranker.data.query_docs import same_text
from ranker.data.ragged import ranges, row_offsets
from ranker.data.token_store import TokenStore
from ranker.hashing import mix
from ranker.types import Contrast


@dataclass(frozen=True)
class KnownPositives:
    """All relevant docs of each query, drawn or not drawn: query row r has `docs[offsets[r]:offsets[r + 1]]`.

    Args:
        offsets: int64 [queries + 1].
        docs: Doc rows, int32 [relevant docs].
        least_label: A drawn doc counts as a positive if its label is at least this.
        query_docs: Row of the doc that has the query's id, -1 where there is none, int64 [queries]; None: no query has
            such a doc.
    """

    offsets: np.ndarray
    docs: np.ndarray
    least_label: float = 1.0
    query_docs: np.ndarray | None = None

    @classmethod
    def of(cls, collection: Collection, queries: TokenStore, docs: TokenStore) -> KnownPositives:
        """Collect relevant docs from the judgements (grade >= `collection.relevance`), or else from the triples.

        Triples are used only if there are no judgements, because MS MARCO has 397 million triples. With judgements, the
        more relevant doc of a triple is a positive only in the steps that have this triple (see `contrast`).
        """
        relevant: dict[str, list[str]] = {
            query_id: [
                doc_id
                for doc_id, grade in judged.items()
                if grade >= collection.relevance and doc_id in collection.docs
            ]
            for query_id, judged in collection.qrels.items()
            if query_id in collection.queries
        }
        if not relevant and collection.triples is not None:
            for query_id, doc_id, _ in collection.triples:
                relevant.setdefault(query_id, []).append(doc_id)
        query_rows = queries.rows(list(relevant))
        counts = np.zeros(len(queries), dtype=np.int64)
        counts[query_rows] = [len(doc_ids) for doc_ids in relevant.values()]
        doc_rows = docs.rows([doc_id for doc_ids in relevant.values() for doc_id in doc_ids])
        order = np.argsort(np.repeat(query_rows, counts[query_rows]), kind="stable")
        least_label = 1.0 if collection.triples is not None else float(max(1, collection.relevance))
        query_docs = docs.find(queries.ids())
        return cls(
            row_offsets(counts),
            doc_rows[order].astype(np.int32),
            least_label,
            query_docs if (query_docs >= 0).any() else None,
        )

    def __getitem__(self, query_row: int) -> np.ndarray:
        return self.docs[self.offsets[query_row] : self.offsets[query_row + 1]]


def contrast(
    collator: Collator, query_rows: np.ndarray, doc_rows: np.ndarray, labels: np.ndarray, positives: KnownPositives
) -> Contrast:
    """Decide which docs of a step each query of the step ranks.

    The positives of a query are its docs in `positives`, and the positives that were drawn for any of its groups in
    this step. Docs are compared by the tokens that the model reads. A group ranks all docs of the step with two
    exceptions:

    - docs that equal a positive of the group's query, and docs with the query's id or text; but the positives that were
      drawn for this group are ranked;
    - docs of other groups that equal a doc of this group, because one doc would have two labels.

    Args:
        collator: Decides which tokens of a doc the model reads.
        query_rows: Rows of the groups' queries [groups].
        doc_rows: Rows of their docs [groups, docs], -1 where a group has no doc.
        labels: Labels of their docs [groups, docs].
        positives: Known positives of all queries.
    """
    mask = doc_rows >= 0
    owners = np.nonzero(mask)[0]
    drawn_labels = labels[mask].astype(np.float32)
    positive = drawn_labels >= positives.least_label
    keys, first, key_of = np.unique(doc_keys(collator, doc_rows[mask]), return_index=True, return_inverse=True)

    relevant = np.zeros((len(query_rows), len(keys)), dtype=bool)
    known = [positives[row] for row in query_rows]
    known_groups = np.repeat(np.arange(len(query_rows)), [len(rows) for rows in known])
    _mark(relevant, known_groups, keys, doc_keys(collator, np.concatenate(known).astype(np.int64)))
    drawn = np.flatnonzero(positive)
    groups, which = np.nonzero(query_rows[:, None] == query_rows[owners[drawn]])
    relevant[groups, key_of[drawn[which]]] = True
    _mark_queries(relevant, collator, query_rows, doc_rows[mask][first], keys, positives.query_docs)

    barred = relevant.copy()
    barred[owners, key_of] = True
    ranked = ~barred[:, key_of]
    ranked[owners, np.arange(len(owners))] = positive | ~relevant[owners, key_of]
    return Contrast(*map(torch.from_numpy, (drawn_labels, owners.astype(np.int64), ranked, positive)))


def own_docs(doc_rows: np.ndarray, labels: np.ndarray, least_label: float = 1.0) -> Contrast:
    """Return the contrast of a step in which each group ranks only its own docs.

    Args:
        doc_rows: Rows of the groups' docs [groups, docs], -1 where a group has no doc.
        labels: Labels of their docs [groups, docs].
        least_label: Smallest label of a positive.
    """
    mask = doc_rows >= 0
    owners, drawn_labels = np.nonzero(mask)[0], labels[mask].astype(np.float32)
    ranked = owners == np.arange(len(doc_rows))[:, None]
    arrays = (drawn_labels, owners.astype(np.int64), ranked, drawn_labels >= least_label)
    return Contrast(*map(torch.from_numpy, arrays))


def _mark(out: np.ndarray, groups: np.ndarray, keys: np.ndarray, wanted: np.ndarray) -> None:
    """Set `out` [groups, keys] to True in row `groups[i]` and the column of key `wanted[i]`, for all i.

    `keys` [keys] is ascending. A wanted key that is not in `keys` is ignored.
    """
    columns = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    present = keys[columns] == wanted
    out[groups[present], columns[present]] = True


def _mark_queries(
    out: np.ndarray,
    collator: Collator,
    query_rows: np.ndarray,
    doc_rows: np.ndarray,
    keys: np.ndarray,
    query_docs: np.ndarray | None,
) -> None:
    """Mark the docs that have the id or the text of the group's query.

    Args:
        out: Bool [groups, keys]; set to True if the doc with the key has the id or text of the group's query.
        collator: Holds the token stores.
        query_rows: [groups].
        doc_rows: Row of one doc with each key [keys].
        keys: Keys of the step's docs, ascending [keys].
        query_docs: See `KnownPositives`.
    """
    groups, docs = np.meshgrid(np.arange(len(query_rows)), np.arange(len(doc_rows)), indexing="ij")
    out |= same_text(
        collator.queries,
        collator.docs,
        query_rows[groups.ravel()],
        doc_rows[docs.ravel()],
        collator.prefix_tokens,
    ).reshape(out.shape)
    if query_docs is not None and len(with_doc := np.flatnonzero(query_docs[query_rows] >= 0)):
        _mark(out, with_doc, keys, doc_keys(collator, query_docs[query_rows[with_doc]]))


def doc_keys(collator: Collator, rows: np.ndarray) -> np.ndarray:
    """Hash the tokens of each doc that the model reads, uint64 [docs]; docs with the same tokens have equal keys.

    Args:
        collator: Holds the docs and their largest number of tokens.
        rows: Rows of the doc store [docs].
    """
    store = collator.docs
    lengths = collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64))
    ends = np.cumsum(lengths)
    tokens = store.tokens[ranges(store.offsets[rows], lengths)]
    # Sums and differences are modulo 2**64, so the differences are right in spite of overflows
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mix(tokens, ranges(0, lengths)), dtype=np.uint64)])
    return mix(sums[ends] - sums[ends - lengths], lengths)
