"""Collections: docs, queries, qrels and candidates of one split, up to the size of MS MARCO. All ids are strings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ranker.data.ragged import ranges, row_offsets
from ranker.errors import DataError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.data.row_pairs import RowSet
    from ranker.types import Run


@dataclass(frozen=True)
class Doc:
    """One document; `title` may be empty."""

    doc_id: str
    text: str
    title: str = ""

    @property
    def full_text(self) -> str:
        """Title and text in the form that models and BM25 read."""
        return f"{self.title} {self.text}" if self.title else self.text


class Docs(Protocol):
    """Docs in a fixed order, with random access by id. The docs may take more space than the memory has."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Doc]: ...

    def __getitem__(self, doc_id: str) -> Doc: ...

    def __contains__(self, doc_id: object) -> bool: ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes if an id or a text changes."""
        ...


def known_docs(docs: Docs, ids: np.ndarray) -> np.ndarray:
    """Return which ids belong to docs, bool [ids]; this is fast for docs that have a method `known`.

    Args:
        docs: The docs.
        ids: The ids, UTF-8 in a bytes array [ids].
    """
    known = getattr(docs, "known", None)
    if known is not None:
        found: np.ndarray = known(ids)
        return found
    return np.array([doc_id.decode() in docs for doc_id in ids], dtype=bool)


def add_to_digest(digest: hashlib.blake2b, doc: Doc) -> None:
    """Add one doc to a corpus fingerprint.

    The same docs in the same order give the same fingerprint for every implementation of `Docs`.
    """
    digest.update(repr((doc.doc_id, doc.title, doc.text)).encode("utf-8", "surrogatepass"))


def fingerprint_of(docs: Iterable[Doc]) -> str:
    """Return the fingerprint of docs in the order given."""
    digest = hashlib.blake2b(digest_size=16)
    for doc in docs:
        add_to_digest(digest, doc)
    return digest.hexdigest()


class MemoryDocs:
    """Docs held in memory.

    Raises:
        DataError: Two docs have the same id.
    """

    def __init__(self, docs: Iterable[Doc]) -> None:
        self._docs: dict[str, Doc] = {}
        digest = hashlib.blake2b(digest_size=16)
        for doc in docs:
            if doc.doc_id in self._docs:
                raise DataError(f"docs: expected each doc id once, got {doc.doc_id!r} twice; remove one")
            self._docs[doc.doc_id] = doc
            add_to_digest(digest, doc)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._docs)

    def __iter__(self) -> Iterator[Doc]:
        return iter(self._docs.values())

    def __getitem__(self, doc_id: str) -> Doc:
        return self._docs[doc_id]

    def __contains__(self, doc_id: object) -> bool:
        return doc_id in self._docs


@dataclass(frozen=True, eq=False)  # Mapping has a comparison; a generated __eq__ would fail on arrays
class Candidates(Mapping[str, list[str]]):
    """First-stage docs of each query, best first, in flat arrays.

    7,000 queries with 1,000 docs each take 110 MB in arrays, and would take 1 GB in dictionaries.

    Args:
        query_ids: The queries, in order.
        offsets: Query i has the docs `doc_ids[offsets[i]:offsets[i + 1]]`, int64 [queries + 1].
        doc_ids: Doc ids, UTF-8 in a fixed-width bytes array [docs].
        scores: Scores of the first stage, float32 or float64 [docs]. Scores from a file stay float64, because rounding
            could make two scores equal, and the tie rule would then change the order of their docs.
    """

    query_ids: list[str]
    offsets: np.ndarray
    doc_ids: np.ndarray
    scores: np.ndarray
    _index_of: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index_of", {query_id: i for i, query_id in enumerate(self.query_ids)})

    @classmethod
    def from_lists(cls, ranked: Iterable[tuple[str, list[str], list[float]]]) -> Candidates:
        """Build from (query_id, doc_ids, scores) of each query; the lists have the best doc first."""
        query_ids: list[str] = []
        offsets, ids, scores = [0], [], []
        for query_id, doc_ids, doc_scores in ranked:
            query_ids.append(query_id)
            offsets.append(offsets[-1] + len(doc_ids))
            ids.append(np.array([doc_id.encode() for doc_id in doc_ids], dtype=np.bytes_))
            scores.append(np.asarray(doc_scores, dtype=np.float64))
        return cls(
            query_ids,
            np.array(offsets, dtype=np.int64),
            np.concatenate(ids) if ids else np.array([], dtype="S1"),
            np.concatenate(scores) if scores else np.array([], dtype=np.float64),
        )

    @classmethod
    def from_run(cls, run: Run) -> Candidates:
        """Build from a run, in trec_eval's order: score descending, then doc id descending."""

        def ranked() -> Iterator[tuple[str, list[str], list[float]]]:
            for query_id, docs in run.items():
                doc_ids = sorted(docs, key=lambda doc_id: (docs[doc_id], doc_id), reverse=True)
                yield query_id, doc_ids, [docs[doc_id] for doc_id in doc_ids]

        return cls.from_lists(ranked())

    def __getitem__(self, query_id: str) -> list[str]:
        return [doc_id.decode() for doc_id in self.ids(query_id)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.query_ids)

    def __len__(self) -> int:
        return len(self.query_ids)

    def __contains__(self, query_id: object) -> bool:
        return query_id in self._index_of

    def ids(self, query_id: str) -> np.ndarray:
        """Return a query's doc ids as bytes [docs]; empty for an unknown query."""
        i = self._index_of.get(query_id)
        return self.doc_ids[:0] if i is None else self.doc_ids[self.offsets[i] : self.offsets[i + 1]]

    def scores_of(self, query_id: str) -> np.ndarray:
        """Return a query's first-stage scores [docs]; empty for an unknown query."""
        i = self._index_of.get(query_id)
        return self.scores[:0] if i is None else self.scores[self.offsets[i] : self.offsets[i + 1]]

    def top(self, depth: int) -> Candidates:
        """Return the first `depth` docs of each query, in their order and with their scores.

        >>> Candidates.from_lists([("q1", ["d2", "d1"], [0.5, 0.4]), ("q2", [], [])]).top(1).to_run()
        {'q1': {'d2': 0.5}, 'q2': {}}
        """
        return self.where(ranges(0, np.diff(self.offsets)) < depth)

    def where(self, kept: np.ndarray) -> Candidates:
        """Return the docs for which `kept`, bool [docs], is True, with their scores; a query without docs stays."""
        offsets = row_offsets(kept)[self.offsets]
        return Candidates(self.query_ids, offsets, self.doc_ids[kept], self.scores[kept])

    def to_run(self, depth: int | None = None) -> Run:
        """Return the first `depth` docs of each query as a run; None: all docs."""
        return {
            query_id: dict(zip(self[query_id][:depth], self.scores_of(query_id)[:depth].tolist(), strict=True))
            for query_id in self.query_ids
        }


@dataclass(frozen=True)
class Collection:
    """The data of one split: texts, judgements and the docs to re-rank.

    Args:
        name: Name of the set in folders and log keys, such as `test/cwe`.
        docs: The whole corpus; splits of one corpus share the object.
        queries: query_id -> text.
        qrels: query_id -> doc_id -> relevance.
        candidates: First-stage docs, which are re-ranked, and from which training draws negatives; None until BM25
            makes candidates.
        triples: Training triples (query_id, more relevant doc_id, less relevant doc_id), re-iterable, or None. If the
            triples have an attribute `fingerprint` that identifies them, their store rows are cached.
        relevance: Smallest grade that counts as relevant, for positives in training and for binary measures.
        drop_query_docs: Whether docs with the query's own id are left out of candidates and search results
            (`ranker.data.query_docs`).
        rows: Arrays of judgements and a teacher's scores. `queries` and `qrels` read these arrays, and training groups
            are drawn from them. None: groups are drawn from `qrels` and `candidates`.
        alike: Whether the docs of `rows` are drawn without regard to their grade; None: true if `rows` have scores
            only.
        instructions: query_id -> instruction of the query, for prompts; None: queries have no instructions.
    """

    name: str
    docs: Docs
    queries: Mapping[str, str]
    qrels: Mapping[str, dict[str, int]]
    candidates: Candidates | None = None
    triples: Iterable[tuple[str, str, str]] | None = None
    relevance: int = 1
    drop_query_docs: bool = False
    rows: RowSet | None = None
    alike: bool | None = None
    instructions: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Splits:
    """The result of a source: a collection for each part; `train` is None for data without a training set."""

    train: Collection | None
    val: Collection | None
    tests: dict[str, Collection]
    notice: str = ""  # licence text to print, if the owner of the data demands it
    sets: dict[str, Splits] = field(default_factory=dict)  # the sets of a mix, whose `train` and `val` are None
    suite: dict[str, Collection] = field(default_factory=dict)  # validation sets that replace those of the source

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation set."""
        return bool(self.suite) or self.val is not None or any(part.val is not None for part in self.sets.values())


class Source(Protocol):
    """A data source, the object that a yaml of conf/data builds."""

    def load(self) -> Splits:
        """Read the collections.

        Raises:
            DataError: A file or package is missing or broken.
        """
        ...
