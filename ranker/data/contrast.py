"""In-batch negatives: which docs of a step's other groups a query may be set against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ranker.data.batching import Collator
from ranker.data.collection import Collection
from ranker.data.query_docs import same_text
from ranker.data.sampling import mix
from ranker.data.token_store import TokenStore
from ranker.types import Contrast


@dataclass(frozen=True)
class KnownPositives:
    """All relevant docs of each query, also those that no group drew: query row r has `docs[offsets[r]:offsets[r + 1]]`.

    Args:
        offsets: int64 [queries + 1].
        docs: Doc rows, int32 [relevant docs].
        least_label: A drawn doc is a positive from this label on.
        own: The doc with the query's id, -1 where there is none, int64 [queries]; None: no query has one.
    """

    offsets: np.ndarray
    docs: np.ndarray
    least_label: float = 1.0
    own: np.ndarray | None = None

    @classmethod
    def of(cls, collection: Collection, queries: TokenStore, docs: TokenStore) -> KnownPositives:
        """Read them off the judgements (grade >= `collection.relevance`), or off the triples where nothing is judged.

        Beside judgements a triple's more relevant doc counts within its step only (`contrast`): there may be 397
        million, as MS MARCO's.
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
        own = docs.find(queries.ids())
        return cls(
            np.concatenate([[0], np.cumsum(counts)]),
            doc_rows[order].astype(np.int32),
            least_label,
            own if (own >= 0).any() else None,
        )

    def __getitem__(self, query_row: int) -> np.ndarray:
        return self.docs[self.offsets[query_row] : self.offsets[query_row + 1]]


def contrast(
    collator: Collator, query_rows: np.ndarray, doc_rows: np.ndarray, labels: np.ndarray, positives: KnownPositives
) -> Contrast:  # fmt: skip
    """Say who stands against whom in a step.

    A query's positives are its known ones and those that any of its groups in the step drew. Left out of its ranking
    are docs that the model can't tell from a positive (the same doc, or the same text under another id) or that are the
    query itself by id or text, unless it is a positive that its own group drew; and docs of other groups that equal a
    doc of its own, whose label they would contradict.

    Args:
        collator: Says what the model sees of a doc.
        query_rows: The groups' queries [groups].
        doc_rows: Their docs [groups, docs], -1 where no doc is.
        labels: [groups, docs].
        positives: Known positives of all queries.
    """
    real = doc_rows >= 0
    owners = np.nonzero(real)[0]
    own_labels = labels[real].astype(np.float32)
    positive = own_labels >= positives.least_label
    distinct, place_of = np.unique(doc_keys(collator, doc_rows[real]), return_inverse=True)

    relevant = np.zeros((len(query_rows), len(distinct)), dtype=bool)
    known = [positives[row] for row in query_rows]
    known_keys = doc_keys(collator, np.concatenate(known).astype(np.int64))
    places = np.minimum(np.searchsorted(distinct, known_keys), len(distinct) - 1)
    present = distinct[places] == known_keys
    relevant[np.repeat(np.arange(len(query_rows)), [len(rows) for rows in known])[present], places[present]] = True
    drawn = np.flatnonzero(positive)
    groups, which = np.nonzero(query_rows[:, None] == query_rows[owners[drawn]])
    relevant[groups, place_of[drawn[which]]] = True

    _add_own(
        relevant,
        collator,
        query_rows,
        doc_rows[real][np.unique(place_of, return_index=True)[1]],
        distinct,
        positives.own,
    )

    barred = relevant.copy()
    barred[owners, place_of] = True
    mask = ~barred[:, place_of]
    mask[owners, np.arange(len(owners))] = positive | ~relevant[owners, place_of]
    return Contrast(*map(torch.from_numpy, (own_labels, owners.astype(np.int64), mask, positive)))


def _add_own(
    out: np.ndarray, collator: Collator, query_rows: np.ndarray, doc_rows: np.ndarray, distinct: np.ndarray, own: np.ndarray | None
) -> None:  # fmt: skip
    """Mark in `out`, bool [groups, distinct docs], the docs that are the group's query: by its id, or by its text.

    Args:
        out: Set to True there.
        collator: Holds the stores.
        query_rows: [groups].
        doc_rows: A doc of each key [distinct docs].
        distinct: The keys, ascending [distinct docs].
        own: As in `KnownPositives`.
    """
    groups, docs = np.meshgrid(np.arange(len(query_rows)), np.arange(len(doc_rows)), indexing="ij")
    starts = (collator.query.prefix_tokens, collator.doc.prefix_tokens)
    out |= same_text(
        collator.queries, collator.docs, query_rows[groups.ravel()], doc_rows[docs.ravel()], starts
    ).reshape(out.shape)
    if own is not None and len(there := np.flatnonzero(own[query_rows] >= 0)):
        keys = doc_keys(collator, own[query_rows[there]])
        places = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
        found = distinct[places] == keys
        out[there[found], places[found]] = True


def doc_keys(collator: Collator, rows: np.ndarray) -> np.ndarray:
    """Hash what the model sees of each doc, its first tokens, to uint64 [docs]: equal for docs that it can't tell apart."""
    store = collator.docs
    lengths = collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64))
    ends = np.cumsum(lengths)
    within = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    tokens = store.tokens[np.repeat(store.offsets[rows], lengths) + within]
    sums = np.concatenate(
        [[np.uint64(0)], np.cumsum(mix(tokens, within), dtype=np.uint64)]
    )  # wraps around, and so do differences
    return mix(sums[ends] - sums[ends - lengths], lengths)
