"""Make training, validation and test sets, with candidates and names, from ids of ir_datasets."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ranker.data.collection import Collection, Docs, Splits
from ranker.data.ir_datasets_access import alone, load_dataset, readable
from ranker.data.ir_datasets_docs import docs_of
from ranker.data.ir_datasets_records import DocPairs, qrels_of, scoreddocs_of
from ranker.data.parsing import check_id
from ranker.data.query_docs import queries_are_docs
from ranker.data.splits import (
    check_candidates,
    check_disjoint,
    check_judged_docs,
    cut_validation,
    hash_order,
    take_queries,
)
from ranker.data.trec import read_candidates
from ranker.errors import ConfigError, DataError

log = logging.getLogger(__name__)

# Parts of an id that name a split of the data
_SPLIT_WORDS = frozenset({"train", "dev", "val", "valid", "validation", "test", "eval", "judged", "small", "queries"})
_TREC_DL_PASSAGES = re.compile(r"msmarco-passage(-v2)?/trec-dl-")


def set_names(dataset_ids: Iterable[str]) -> dict[str, str]:
    """Name each set by the last part of its id that is not a split name; if two names are equal, use longer names.

    >>> set_names(["beir/scifact/test", "msmarco-passage/trec-dl-2019/judged"])
    {'beir/scifact/test': 'scifact', 'msmarco-passage/trec-dl-2019/judged': 'trec-dl-2019'}
    >>> set_names(["msmarco-passage/dev/small", "msmarco-passage/dev"])
    {'msmarco-passage/dev/small': 'msmarco-passage-dev-small', 'msmarco-passage/dev': 'msmarco-passage-dev'}
    """
    short, longer = {}, {}
    for dataset_id in dataset_ids:
        parts = dataset_id.split("/")
        last = max((i for i, part in enumerate(parts) if part not in _SPLIT_WORDS), default=0)
        short[dataset_id], longer[dataset_id] = parts[last], "-".join(parts[last:])
    for names in (short, longer):
        if len(set(names.values())) == len(names):
            return names
    return {dataset_id: dataset_id.replace("/", "-") for dataset_id in short}


def _run_file(where: str, dataset_id: str) -> Path:
    path = Path(where).expanduser()
    if not path.is_file():
        raise DataError(
            f"{where}: expected docpairs, scoreddocs, bm25 or a run file as candidates of {dataset_id}, got no such "
            "file; check the path"
        )
    return path


@dataclass
class SplitReader:
    """Makes the splits from ids of ir_datasets.

    Args:
        train: Id to train on, or None.
        val: Id to validate on; None: queries are moved from train.
        test: Id or ids to test on.
        train_candidates: Source of the training docs: `docpairs` (triples of the data set), `scoreddocs`, `bm25`
            (computed) or the path of a run file. None: the first of docpairs, scoreddocs and bm25 that is available.
        candidates: Docs to re-rank in validation and tests: `scoreddocs` or `bm25`, or a mapping from ids to one of
            these two or to a run file. None: scoreddocs if the data set has scoreddocs, else bm25.
        relevance: Smallest grade that counts as relevant, for all sets or by id. None: 2 for TREC DL passage sets, else
            1.
        val_queries: Number of judged queries to validate on, chosen by hash. None: all queries of `val`, or a tenth of
            train if `val` is None.
        max_triples: Number of docpairs to read, from the first; None: all.
        split_seed: Seed of the hash.
    """

    train: str | None
    val: str | None
    test: str | list[str] | tuple[str, ...]
    train_candidates: str | None
    candidates: str | dict[str, str] | None
    relevance: int | dict[str, int] | None
    val_queries: int | None
    max_triples: int | None
    split_seed: int

    def __post_init__(self) -> None:
        self._docs: dict[str, Docs] = {}
        self.test = [self.test] if isinstance(self.test, str) else list(self.test)
        if len(set(self.test)) < len(self.test):
            raise ConfigError(f"data.test: expected each id once, got {self.test}; remove the repeat")
        if isinstance(self.candidates, str) and self.candidates not in ("scoreddocs", "bm25"):
            raise ConfigError(
                "data.candidates: expected scoreddocs, bm25, null or a mapping of ids to these or run files, got "
                f"{self.candidates!r}; set one"
            )
        ids = {self.train, self.val, *self.test}
        for key, given in (("candidates", self.candidates), ("relevance", self.relevance)):
            unknown = sorted(set(given) - ids) if isinstance(given, dict) else []
            if unknown:
                raise ConfigError(
                    f"data.{key}: expected ids of data.train, data.val or data.test, got {unknown[0]!r}; correct or "
                    "remove it"
                )
        for key, number in (("val_queries", self.val_queries), ("max_triples", self.max_triples)):
            if number is not None and number < 1:
                raise ConfigError(f"data.{key}: expected a number above 0 or null, got {number!r}; set another")

    def check(self) -> None:
        """Check that the ids and run files exist, without reading them.

        Raises:
            DataError: An id is unknown, or a run file is missing.
        """
        assert isinstance(self.test, list)
        for dataset_id in (self.train, self.val, *self.test):
            if dataset_id is not None:
                load_dataset(dataset_id)
        by_id = self.candidates if isinstance(self.candidates, dict) else {}
        for dataset_id, where in ((self.train, self.train_candidates), *by_id.items()):
            if dataset_id is not None and where not in (None, "docpairs", "scoreddocs", "bm25"):
                _run_file(where, dataset_id)

    def read(self) -> Splits:
        """Read all sets, in one process at a time, so that the first process builds caches for the other processes.

        Raises:
            DataError: An id is unknown, a set can't be read or lacks data that its use requires, or two sets share a
                query.
        """
        with alone():
            train = None if self.train is None else self._train(self.train)
            val = None if self.val is None else self._evaluation(self.val, "val")
            names = set_names(self.test)
            tests = {names[dataset_id]: self._evaluation(dataset_id, names[dataset_id]) for dataset_id in self.test}
            if val is not None and self.val_queries is not None:
                val = take_queries(
                    val, hash_order(val.qrels or val.queries, self.split_seed)[: self.val_queries], "val"
                )
            if train is not None and val is None:
                train, val = cut_validation(
                    train, self.val_queries or max(1, round(len(train.qrels) * 0.1)), self.split_seed
                )
            splits = Splits(train, val, tests)
            check_disjoint(splits)
            return splits

    def _evaluation(self, dataset_id: str, name: str) -> Collection:
        """Read a set to validate or test on: its judged queries, or all queries if it has no qrels."""
        collection = self._collection(dataset_id, name)
        if collection.qrels:
            collection = take_queries(collection, collection.qrels, name)
            check_judged_docs(dict(collection.qrels), collection, f"ir_datasets {dataset_id}")
        where = self.candidates.get(dataset_id) if isinstance(self.candidates, dict) else self.candidates
        if where is None:
            where = "scoreddocs" if load_dataset(dataset_id).has_scoreddocs() else "bm25"
        log.info("%s: candidates come from %s", dataset_id, where)
        return self._with_candidates(collection, dataset_id, where)

    def _train(self, dataset_id: str) -> Collection:
        collection = self._collection(dataset_id, "train")
        dataset = load_dataset(dataset_id)
        where = self.train_candidates
        if where is None:
            where = "docpairs" if dataset.has_docpairs() else "scoreddocs" if dataset.has_scoreddocs() else "bm25"
        log.info("%s: training docs come from %s", dataset_id, where)
        if where == "docpairs":
            if not dataset.has_docpairs():
                raise DataError(
                    f"ir_datasets {dataset_id}: expected docpairs, got a set without; set data.train_candidates to "
                    "scoreddocs, bm25 or a run file"
                )
            triples = DocPairs(dataset_id, self.max_triples)
            with readable(dataset_id):  # read one triple now: this may download, and only one process is here
                if next(iter(triples), None) is None:
                    raise DataError(
                        f"ir_datasets {dataset_id}: expected docpairs, got none; set data.max_triples higher or to null"
                    )
            return replace(collection, triples=triples)
        if not collection.qrels:
            raise DataError(
                f"ir_datasets {dataset_id}: expected qrels to train on, got a set without; name another as data.train"
            )
        return self._with_candidates(take_queries(collection, collection.qrels, "train"), dataset_id, where)

    def _with_candidates(self, collection: Collection, dataset_id: str, where: str) -> Collection:
        """Add candidates from `scoreddocs` or a run file; candidates of `bm25` are computed later."""
        if where == "bm25":
            return collection
        if where == "scoreddocs":
            dataset = load_dataset(dataset_id)
            if not dataset.has_scoreddocs():
                raise DataError(
                    f"ir_datasets {dataset_id}: expected scoreddocs, got a set without; use bm25 or a run file"
                )
            with readable(dataset_id):
                return replace(collection, candidates=scoreddocs_of(dataset, dataset_id, collection.queries))
        path = _run_file(where, dataset_id)
        collection = replace(collection, candidates=read_candidates(path))
        check_candidates(collection, str(path))
        return collection

    def _collection(self, dataset_id: str, name: str) -> Collection:
        dataset = load_dataset(dataset_id)
        for has, what in ((dataset.has_docs(), "docs"), (dataset.has_queries(), "queries")):
            if not has:
                raise DataError(
                    f"ir_datasets {dataset_id}: expected a set with {what}, got one without; name one of its parts"
                )
        with readable(dataset_id):
            docs = self._docs_of(dataset_id)
            queries = {query.query_id: query.default_text() for query in dataset.queries_iter()}
            qrels = qrels_of(dataset, dataset_id) if dataset.has_qrels() else {}
        for query_id in queries:
            check_id(query_id, f"ir_datasets {dataset_id}", "a query id")
        lacking = sorted(query_id for query_id in qrels if query_id not in queries)
        if lacking:
            log.warning(
                "ir_datasets %s: %d judged queries have no text, as %r, and are left out",
                dataset_id,
                len(lacking),
                lacking[0],
            )
        qrels = {query_id: judged for query_id, judged in qrels.items() if query_id in queries}
        return Collection(
            name,
            docs,
            queries,
            qrels,
            relevance=self._relevance(dataset_id),
            drop_query_docs=queries_are_docs(dataset_id),
        )

    def _docs_of(self, dataset_id: str) -> Docs:
        import ir_datasets

        corpus_id = ir_datasets.docs_parent_id(dataset_id)
        if corpus_id not in self._docs:
            self._docs[corpus_id] = docs_of(corpus_id)
        return self._docs[corpus_id]

    def _relevance(self, dataset_id: str) -> int:
        given = self.relevance.get(dataset_id) if isinstance(self.relevance, dict) else self.relevance
        return given if given is not None else 2 if _TREC_DL_PASSAGES.match(dataset_id) else 1
